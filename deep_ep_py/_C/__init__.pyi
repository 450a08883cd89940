# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The native part of deep_ep_py.
"""

from __future__ import annotations
import collections.abc
import typing
from . import nvshmem
from . import executor
from . import timeline
from . import normal
from . import two_hops
from . import expand
from . import low_latency
from . import measure
from . import proxy
from . import cuda
from . import ptx

__all__: list[str] = [
    "ABORTED",
    "BOUNDS_PHASE",
    "BufferOptions",
    "CHUNK_SLOTS",
    "Call",
    "DATA_PHASE",
    "DIED",
    "ELSEWHERE",
    "EXCEPTION",
    "Failure",
    "Heap",
    "KernelSource",
    "LEFT",
    "LibfabricHere",
    "LibfabricProvider",
    "MASKED",
    "MASK_PHASE",
    "MAX_RANKS",
    "MAX_REGIONS",
    "MAX_TOKENS",
    "MISMATCH",
    "Meeting",
    "Mesh",
    "NETWORK",
    "NetworkOptions",
    "NicCounters",
    "NicMessage",
    "NicOptions",
    "OTHER_IDS",
    "OUTDATED",
    "OVERFLOW",
    "Run",
    "Runner",
    "Runtime",
    "SIGNAL_UNIT",
    "SILENT",
    "SILENT_SECONDS",
    "STAGES",
    "STREAMING_THRESHOLD",
    "StagesOfLaunch",
    "TIMEOUT",
    "UNHEARD",
    "WARP_SIZE",
    "control_bytes",
    "copy_row_to_many",
    "copy_rows",
    "cuda",
    "executor",
    "expand",
    "heap_bytes",
    "ids_fit",
    "libfabric_here",
    "libfabric_refusal",
    "low_latency",
    "measure",
    "near_bytes",
    "normal",
    "nvshmem",
    "pretouch",
    "proxy",
    "proxy_providers",
    "ptx",
    "round_to_bf16",
    "round_to_e4m3",
    "round_to_logfmt",
    "route_named",
    "sum_instructions",
    "sum_row",
    "syndrome_name",
    "tag",
    "timeline",
    "two_hops",
    "widen_to_float",
]

class Mesh:
    """
    Connections to ranks on other machines, and the thread that serves them.
    """
    class State:
        """
        Members:

          HEARD

          ENDED

          SILENT

          UNHEARD
        """

        ENDED: typing.ClassVar[Mesh.State]
        HEARD: typing.ClassVar[Mesh.State]
        SILENT: typing.ClassVar[Mesh.State]
        UNHEARD: typing.ClassVar[Mesh.State]
        __members__: typing.ClassVar[dict[str, Mesh.State]]
        @typing.overload
        def __eq__(self, other: Mesh.State) -> bool: ...
        @typing.overload
        def __eq__(self, other: typing.Any) -> bool: ...
        def __getstate__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __index__(self) -> int: ...
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        @typing.overload
        def __ne__(self, other: Mesh.State) -> bool: ...
        @typing.overload
        def __ne__(self, other: typing.Any) -> bool: ...
        def __repr__(self) -> str: ...
        def __setstate__(self, state: int) -> None: ...
        def __str__(self) -> str: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    class End:
        def __init__(self, *, rank: int, socket: int, machine: str, own: bytes, theirs: bytes) -> None: ...

    def __init__(self, ends: collections.abc.Sequence[Mesh.End]) -> None: ...
    def clear_news(self) -> None: ...
    def close_in_child(self) -> None: ...
    def drop(self, rank: int) -> None: ...
    def has_news(self, rank: int) -> bool: ...
    def receive(self, rank: int) -> typing.Any: ...
    def send(self, rank: int, message: bytes) -> None: ...
    def state(self, rank: int) -> Mesh.State: ...
    @property
    def news(self) -> int:
        """
        A descriptor that is readable when there may be news.
        """
    @property
    def ranks(self) -> list[int]: ...

class Heap:
    @staticmethod
    def make_plain(bytes: int, gives_back: bool = False) -> Heap: ...
    @staticmethod
    def make_shared(bytes: int, gives_back: bool = False) -> Heap: ...
    @staticmethod
    def map(descriptor: int, bytes: int) -> Heap: ...
    def close_descriptor(self) -> None: ...
    @property
    def base(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def mapped(self) -> int: ...

class Failure:
    @property
    def cause(self) -> str: ...
    @property
    def cause_peer(self) -> int: ...
    @property
    def cause_rank(self) -> int: ...
    @property
    def cause_reason(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def reason(self) -> int: ...
    @property
    def seen(self) -> int: ...

class Call:
    @property
    def arguments(self) -> dict: ...
    @property
    def captured(self) -> bool: ...
    @property
    def failure(self) -> Failure: ...
    @property
    def generation(self) -> int: ...
    @property
    def graph_gone(self) -> bool: ...
    @property
    def kind(self) -> str: ...
    @property
    def mismatch(self) -> tuple[int, str]: ...
    @property
    def operation(self) -> int: ...
    @property
    def waited(self) -> float: ...

class NicOptions:
    atomics_pass: bool
    fault_flushes: bool
    relaxed: bool
    traced: bool
    def __init__(self) -> None: ...
    @property
    def blocks(self) -> int: ...
    @blocks.setter
    def blocks(self, arg0: int) -> None: ...
    @property
    def chunk_log2(self) -> int: ...
    @chunk_log2.setter
    def chunk_log2(self, arg0: int) -> None: ...
    @property
    def fault_after(self) -> int: ...
    @fault_after.setter
    def fault_after(self, arg0: int) -> None: ...
    @property
    def fault_peer(self) -> int: ...
    @fault_peer.setter
    def fault_peer(self, arg0: int) -> None: ...
    @property
    def fault_rank(self) -> int: ...
    @fault_rank.setter
    def fault_rank(self, arg0: int) -> None: ...
    @property
    def fault_syndrome(self) -> int: ...
    @fault_syndrome.setter
    def fault_syndrome(self, arg0: int) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @in_flight.setter
    def in_flight(self, arg0: int) -> None: ...
    @property
    def key_offset(self) -> int: ...
    @key_offset.setter
    def key_offset(self, arg0: int) -> None: ...
    @property
    def max_bytes(self) -> int: ...
    @max_bytes.setter
    def max_bytes(self, arg0: int) -> None: ...
    @property
    def max_delay(self) -> int: ...
    @max_delay.setter
    def max_delay(self, arg0: int) -> None: ...
    @property
    def mtu(self) -> int: ...
    @mtu.setter
    def mtu(self, arg0: int) -> None: ...
    @property
    def nics(self) -> int: ...
    @nics.setter
    def nics(self, arg0: int) -> None: ...
    @property
    def queues_per_peer(self) -> int: ...
    @queues_per_peer.setter
    def queues_per_peer(self, arg0: int) -> None: ...

class NetworkOptions:
    def __init__(
        self,
        *,
        nic: NicOptions,
        in_process: bool,
        provider: str,
        address: str,
        cpus: collections.abc.Sequence[int],
        mesh: Mesh | None,
        nvshmem: nvshmem.Wanted | None,
    ) -> None: ...

class NicCounters:
    @property
    def atomics(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def doorbells(self) -> int: ...
    @property
    def writes(self) -> int: ...

class NicMessage:
    @property
    def bytes(self) -> int: ...
    @property
    def destination(self) -> int: ...
    @property
    def opcode(self) -> int: ...
    @property
    def queue(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def time_ns(self) -> int: ...

class KernelSource:
    """
    Kernels that a Runtime launches.
    """

class Meeting:
    class Result:
        """
        Members:

          MET

          LATE

          GONE

          OTHER_MASK

          LATER_ATTEMPT
        """

        GONE: typing.ClassVar[Meeting.Result]
        LATE: typing.ClassVar[Meeting.Result]
        LATER_ATTEMPT: typing.ClassVar[Meeting.Result]
        MET: typing.ClassVar[Meeting.Result]
        OTHER_MASK: typing.ClassVar[Meeting.Result]
        __members__: typing.ClassVar[dict[str, Meeting.Result]]
        @typing.overload
        def __eq__(self, other: Meeting.Result) -> bool: ...
        @typing.overload
        def __eq__(self, other: int) -> bool: ...
        @typing.overload
        def __eq__(self, other: typing.Any) -> bool: ...
        def __getstate__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __index__(self) -> int: ...
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        @typing.overload
        def __ne__(self, other: Meeting.Result) -> bool: ...
        @typing.overload
        def __ne__(self, other: int) -> bool: ...
        @typing.overload
        def __ne__(self, other: typing.Any) -> bool: ...
        def __repr__(self) -> str: ...
        def __setstate__(self, state: int) -> None: ...
        def __str__(self) -> str: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    @property
    def attempt(self) -> int: ...
    @property
    def left_out(self) -> list[int]: ...
    @property
    def peer(self) -> int: ...
    @property
    def result(self) -> Meeting.Result: ...

class BufferOptions:
    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        regions: int,
        region_bytes: int,
        arena_bytes: int,
        timeout: float,
        calls: int,
        call_words: int,
        notes_stages: bool,
        masks_ranks: bool,
        poison: bool,
        has_remote: bool,
        routes: collections.abc.Sequence[str],
        rank_key: int,
        ranks_per_node: int,
        near_audience: bool,
        bytes_in_flight: int,
    ) -> None: ...
    @property
    def fabrics(self) -> list[str]:
        """
        Those that reach ranks which are not mapped.
        """
    @property
    def masks_ranks(self) -> bool: ...
    @property
    def notes_stages(self) -> bool: ...

class LibfabricProvider:
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

class LibfabricHere:
    @property
    def providers(self) -> list[LibfabricProvider]:
        """
        Those that the proxy can use, best first.
        """
    @property
    def refusal(self) -> str:
        """
        Why it cannot be used.
        """
    @property
    def version(self) -> str:
        """
        Empty if it cannot be used.
        """

class StagesOfLaunch:
    """
    When the warps of a launch ended their stages.
    """
    @property
    def blocks(self) -> int: ...
    @property
    def ended_ns(self) -> list[int]:
        """
        [blocks, warps, STAGES], by the clock of kernels; 0: none.
        """
    @property
    def kernel(self) -> str: ...
    @property
    def launched_ns(self) -> int:
        """
        Right before, as time.monotonic_ns().
        """
    @property
    def warps(self) -> int:
        """
        Of each block.
        """

class Runtime:
    def __init__(
        self,
        options: BufferOptions,
        heaps: collections.abc.Sequence[Heap],
        near: collections.abc.Sequence[Heap | None],
        network: NetworkOptions,
        kernels: KernelSource = None,
    ) -> None: ...
    def abort(self, reason: int, peer: int = -1) -> None: ...
    def abort_generation(self, arg0: int, arg1: int) -> None: ...
    def abort_word(self, arg0: int) -> int:
        """
        Return the address of a rank's abort word in this generation; 0 if it is not reached from here.
        """
    def aborted(self) -> bool: ...
    def added_pieces(self) -> list[tuple[int, int]]:
        """
        Return offset and bytes of each piece by which this rank's heap has grown.
        """
    def allocate(self, shape: collections.abc.Sequence[int], code: int, bits: int) -> typing.Any:
        """
        Return a DLPack capsule of CPU memory, or None if there is no room.
        """
    def announce(self, heap_bytes: int) -> None: ...
    def arena_contains(self, arg0: int, arg1: int) -> bool: ...
    def behind(self, call: Call) -> list[tuple[int, int]]: ...
    def clear_words(self, arg0: int) -> None: ...
    def compiling_peers(self) -> list[int]: ...
    def connect(self, left_out: collections.abc.Sequence[int], generation: int) -> None: ...
    def drain(self) -> bool: ...
    def export_piece(self, offset: int, bytes: int) -> int:
        """
        Return a descriptor for a peer's map_piece. The caller closes it.
        """
    def finished(self, arg0: Call) -> bool: ...
    def forgive(self, seconds: float) -> bool: ...
    def gone(self, arg0: int) -> bool: ...
    def heap_offset(self, arg0: int) -> int: ...
    def leave(self) -> None: ...
    def look_up_peers(self, seconds: float) -> int: ...
    def map_piece(self, rank: int, offset: int, bytes: int, descriptor: int) -> None: ...
    def mapped(self, rank: int) -> int:
        """
        Return how many bytes of a rank's heap are backed by memory in this process.
        """
    def mask(self, rank: int) -> bool: ...
    def meet(self, left_out: collections.abc.Sequence[int], attempt: int, again: bool, seconds: float) -> Meeting: ...
    def note_told(self) -> None: ...
    def on_compiling_peer(self, arg0: collections.abc.Callable[[Call, int], None]) -> None: ...
    def others_have_failed(self) -> bool: ...
    def pass_abort_on(self) -> None: ...
    def peer_base(self, arg0: int) -> int: ...
    def pretouch(self) -> None:
        """
        Make every page of the heaps that kernels access directly present in this process, without changing it.
        """
    def publish(self, arg0: int, arg1: collections.abc.Sequence[int]) -> None: ...
    def record_stages(self, bytes: int) -> None:
        """
        Record the stages of the kernels launched from now on.
        """
    def retire(self, arg0: Call) -> None: ...
    def set_compiling(self, arg0: bool) -> None: ...
    def set_timeout(self, seconds: float) -> None: ...
    def settle(self, seconds: float) -> bool: ...
    def share(self, call: Call) -> None: ...
    def stop_all(self, seconds: float) -> bool: ...
    def take_remark(self) -> int: ...
    def take_stages(self, seconds: float) -> list[StagesOfLaunch]:
        """
        End the record, and return what it has. Waits for kernels; returns nothing if some run for longer.
        """
    def wait(self, call: Call) -> None: ...
    def wait_counts(self, call: Call) -> None: ...
    def wait_gone(self, left_out: collections.abc.Sequence[int], seconds: float) -> int: ...
    def wait_launch(self, serial: int) -> None: ...
    def watch(
        self, arg0: collections.abc.Sequence[tuple[int, int]], arg1: collections.abc.Sequence[tuple[int, int]]
    ) -> None: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def arena_resident(self) -> int: ...
    @property
    def arena_returned(self) -> int: ...
    @property
    def arena_used(self) -> int: ...
    @property
    def control_bytes(self) -> int: ...
    @property
    def heap_bytes(self) -> int: ...
    @property
    def launched_ns(self) -> int:
        """
        Time of the latest hand-over of a launch to the launcher, as time.monotonic_ns(); 0: none yet.
        """
    @property
    def masked(self) -> list[int]: ...
    @property
    def max_put_bytes(self) -> int: ...
    @property
    def network_counters(self) -> list[NicCounters]: ...
    @property
    def network_fault(self) -> str: ...
    @property
    def network_refusal(self) -> str: ...
    @property
    def network_trace(self) -> list[NicMessage]: ...
    @property
    def notes_stages(self) -> bool: ...
    @property
    def stages_lost(self) -> int:
        """
        Launches of the record that were not kept.
        """

class Run:
    """
    A job of a Runner.
    """
    def result(self) -> bool:
        """
        Wait for the job; return its result, or raise its exception.
        """
    @property
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...

class Runner:
    """
    A thread that waits for a Buffer's kernels without needing the GIL.
    """
    def __init__(self, runtime: Runtime) -> None: ...
    def rest(self, seconds: float) -> bool:
        """
        Return whether it has nothing to do.
        """
    def run(self, name: str, call: Call = None, serial: int = 0, seconds: float = 0.0) -> bool:
        """
        Run one of the runtime's waits, in the calling thread unless it takes long or the Runner is busy; return its result.
        """
    def start(self, name: str, call: Call = None, serial: int = 0, seconds: float = 0.0) -> Run:
        """
        Start one of the runtime's waits, by the name of its method; return the Run.
        """

def control_bytes(arg0: BufferOptions) -> int: ...
def copy_row_to_many(dst: collections.abc.Sequence[int], src: int, bytes: int, streaming: bool) -> None:
    """
    Copy one row to every address of the list `dst`.
    """

def copy_rows(dst_addresses: int, src_addresses: int, n: int, row_bytes: int, streaming: bool) -> None:
    """
    Copy n rows one after the other; the addresses are arrays of n 64-bit words.
    """

def heap_bytes(arg0: BufferOptions) -> int: ...
def ids_fit(ids: int, n: int, id_bytes: int, experts: int) -> bool:
    """
    Return whether each of n expert ids is -1 or less than `experts`.
    """

def libfabric_here() -> LibfabricHere:
    """
    Return which libfabric can be used here.
    """

def libfabric_refusal(provider: str, address: str) -> str:
    """
    Return why the proxy cannot use a provider, or any provider, to reach other machines from an address; empty if it can.
    """

def near_bytes(arg0: BufferOptions) -> int: ...
def pretouch(address: int, bytes: int) -> None:
    """
    Make every page of a range present without changing it.
    """

def proxy_providers() -> list[str]:
    """
    Return the libfabric providers that the proxy can use here, best first.
    """

def round_to_bf16(dst: int, src: int, n: int) -> None:
    """
    Round n floats to nearest even.
    """

def round_to_e4m3(dst: int, src: int, n: int) -> None:
    """
    Round n floats to float8_e4m3fn, to nearest even; larger values saturate.
    """

def round_to_logfmt(dst: int, src: int, n: int) -> None:
    """
    Round n bfloat16 values to LogFMT in groups of LOG_GROUP and decode them to fp32.
    """

def route_named(name: str) -> int:
    """
    Return the number of a fabric's route.
    """

def sum_instructions() -> list[str]:
    """
    Return the instruction sets of this CPU for which sum_row has a version, widest first.
    """

def sum_row(
    dst: int,
    src: collections.abc.Sequence[int],
    bias0: int,
    bias1: int,
    elements: int,
    instructions: str = "",
    weights: collections.abc.Sequence[float] = [],
) -> None:
    """
    Sum bfloat16 rows in list order, times their weights if given, then the biases (0: none), in fp32, rounded once.
    """

def syndrome_name(syndrome: int) -> str: ...
def tag(key: bytes, text: str) -> bytes:
    """
    SipHash-2-4 of 128 bits.
    """

def widen_to_float(dst: int, src: int, n: int) -> None:
    """
    Widen n bfloat16 values to fp32.
    """

ABORTED: int = 2
BOUNDS_PHASE: str = "bounds of sizes and offsets"
CHUNK_SLOTS: int = 4
DATA_PHASE: str = "rows stored (data)"
DIED: int = 7
ELSEWHERE: int = 9
EXCEPTION: int = 4
LEFT: int = 8
MASKED: int = 10
MASK_PHASE: str = "ranks left out"
MAX_RANKS: int = 1024
MAX_REGIONS: int = 16
MAX_TOKENS: int = 2097151
MISMATCH: int = 3
NETWORK: int = 6
OTHER_IDS: int = 14
OUTDATED: int = 11
OVERFLOW: int = 5
SIGNAL_UNIT: int = 32768
SILENT: int = 12
SILENT_SECONDS: float = 5.0
STAGES: list = [
    "",
    "enter",
    "number tokens",
    "send routings",
    "store rows",
    "signal",
    "note own choices",
    "await counts",
    "sum counts",
    "await offers",
    "await routings",
    "await results",
    "place rows",
    "sum rows",
    "serve chunks",
    "finish",
]
STREAMING_THRESHOLD: int
TIMEOUT: int = 1
UNHEARD: int = 13
WARP_SIZE: int = 32
