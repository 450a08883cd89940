"""Which part may include or import which: dependencies point down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import native_build
from deep_ep_py.base import sources
from deep_ep_py.device.jit import KERNELS as LISTED
from places import CSRC, ROOT

pytestmark = pytest.mark.once

KERNELS = (
    "kernels/common",
    "kernels/normal",
    "kernels/two_hops",
    "kernels/expand",
    "kernels/low_latency",
    "kernels/measure",
)
EXECUTOR = ("sim/executor", "sim/vector")
MODES = ("host/modes/normal", "host/modes/expand", "host/modes/low_latency", "host/modes/measure")
HOST = ("host/heap", "host/control", "host/launch", "host/network")
# A folder may include itself and those named here. Longer names are matched first.
INCLUDES = {
    "wire": set(),
    "device": {"wire"},
    "fabric": {"device", "wire"},
    "kernels/common": {"fabric", "device", "wire"},
    "kernels/normal": {"kernels/common", "fabric", "device", "wire"},
    "kernels/two_hops": {"kernels/normal", "kernels/common", "fabric", "device", "wire"},
    "kernels/expand": {"kernels/common", "fabric", "device", "wire"},
    "kernels/low_latency": {"kernels/common", "fabric", "device", "wire"},
    "kernels/measure": {"kernels/common", "fabric", "device", "wire"},
    "kernels": {*KERNELS},  # the registry
    "observe": {"wire"},
    "host/heap": {"wire"},
    "host/control": {"host/heap", "observe", "wire"},
    "host/launch": {"kernels/common"},
    "host/network/ibgda": {"host/network", "host/heap", "fabric", "wire"},
    "host/network/proxy": {"host/network", "host/heap", "observe", "fabric", "wire"},
    "host/network": {"host/heap", "fabric", "wire"},
    "host/nvshmem": {"host/heap", "host/network", "wire"},
    "host/session": {*HOST, "kernels/common", "observe", "fabric", "wire"},
    "host/modes/normal": {"host/session", "kernels/normal", "kernels/two_hops", "wire"},
    "host/modes/expand": {"host/session", "host/modes/normal", "kernels/expand", "wire"},
    "host/modes/low_latency": {"host/session", "kernels/low_latency", "device", "wire"},
    "host/modes/measure": {"host/session", "kernels/measure", "wire"},
    "host/cuda": {"host/heap", "host/launch", "observe"},
    # What stands in for hardware.
    "sim/executor": {"observe", "device", "wire"},
    "sim/vector": {"device", "wire"},
    "sim/device": {"device", "wire", "sim/executor", "sim/vector"},
    "sim/nic/network": {
        *("host/network/ibgda", "host/network", "host/heap", "sim/nic", "sim/executor", "observe"),
        *("fabric", "device", "wire"),
    },
    "sim/nic": {"host/network", "observe", "wire"},
    "sim/network": {
        *("host/network/proxy", "host/network", "sim/executor", "sim/nic", "observe", "fabric", "device", "wire")
    },
    "sim/host": {*HOST, *EXECUTOR, "kernels", "observe", "fabric", "device"},
    "sim/ptx": {"sim/executor", "observe", "device", "wire"},
    "python": {
        *HOST,
        "host/network/proxy",
        "host/nvshmem",
        "host/session",
        *MODES,
        "sim/host",
        "host/cuda",
        "sim/ptx",
        "sim/network",
        *EXECUTOR,
        *KERNELS,
        "sim/nic",
        "observe",
        "fabric",
        "device",
        "wire",
    },
}
# NVRTC ships no standard headers, so the sources it compiles include none.
FOR_GPUS = {*native_build.FOR_GPUS, *KERNELS}

# The same for the parts of the Python package, which are modules and folders; "" is the package's own module.
GROUND = {"_version", "errors", "base"}
IMPORTS = {
    "_version": set(),
    "errors": set(),
    "base": {"errors"},
    "device.jit": GROUND,
    "device.rowwise": GROUND,
    "device": GROUND | {"device.jit"},
    "transport.bootstrap": GROUND,
    "transport.topology": GROUND | {"transport.bootstrap"},
    "transport.nvshmem": GROUND | {"transport.bootstrap", "device.jit"},
    "session": GROUND | {"transport.bootstrap", "transport.topology", "device"},
    "modes.normal": GROUND | {"device", "session"},
    "modes.low_latency": GROUND | {"device", "session"},
    "v1": GROUND | {"session", "modes.low_latency"},
    "buffer": GROUND
    | {"transport.bootstrap", "transport.topology", "transport.nvshmem", "device", "session"}
    | {"modes.normal", "modes.low_latency", "v1"},
    "v2": GROUND | {"transport.bootstrap", "device", "modes.normal", "buffer"},
    "testing": GROUND | {"device"},
    "nvshmem": {"transport.nvshmem"},
    "": GROUND | {"transport.topology", "buffer", "v2"},
    "ops": GROUND | {"device.rowwise", "modes.normal", "modes.low_latency", "buffer", "v2"},
    "moe": GROUND | {"device.rowwise", "ops"},
    "eplb": GROUND | {"transport.bootstrap", "buffer", "v2"},
    "compat": GROUND | {"device.rowwise", "v1", ""},
    "tools.trace": GROUND | {"session"},
    "tools.bench": GROUND | {"device.jit", "device", "transport.bootstrap", "testing", "moe", ""},
    "tools.profile": GROUND | {"device.jit", "device", "testing", "tools.bench", ""},
    "tools.doctor": GROUND
    | {"device.jit", "device", "transport.bootstrap", "transport.nvshmem", "transport.topology", "buffer", "compat"},
    "tools.cli": GROUND | {"device.jit", "device", "compat", "tools.doctor"},
    "examples": GROUND | {"ops", "moe", "tools.bench", ""},
    "__main__": GROUND | {"device"},
}
WITHOUT_CODE = ("deep_ep_py", "deep_ep_py.modes", "deep_ep_py.tools", "deep_ep_py.transport")


def layer_of(name: str) -> str | None:
    return next((layer for layer in INCLUDES if name.startswith(layer + "/")), None)


def test_kernels_are_compiled_from_what_their_cache_hashes() -> None:
    assert sorted(sources._DEVICE_FOLDERS) == sorted(native_build.FOR_GPUS)


def test_includes_point_down() -> None:
    wrong = []
    for path in sorted(CSRC.rglob("*.*")):
        name = path.relative_to(CSRC).as_posix()
        layer = layer_of(name)
        assert layer is not None, f"{name} belongs to no layer"
        for system, own in re.findall(r'^#\s*include (?:<(.+)>|"(.+)")', path.read_text(), re.MULTILINE):
            allowed = {layer, *INCLUDES[layer]}
            if (system and layer in FOR_GPUS) or (own and layer_of(own) not in allowed):
                wrong.append(f"{name} includes {system or own}")
    assert not wrong


def imported(tree: ast.AST, for_types: bool = False) -> Iterator[str]:
    """Yield the full names of all imports, those for types only if asked for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported(node, for_types)


def part_of(name: str) -> str:
    """Return the part to which a module, or a name in one, belongs."""
    below = name.partition("deep_ep_py.")[2]
    return next((part for part in IMPORTS if part and f"{below}.".startswith(f"{part}.")), "")


def test_imports_point_down() -> None:
    wrong, parts = [], set()
    for path in sorted((ROOT / "deep_ep_py").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        part = part_of(name)
        parts.add(part)
        assert part or name in WITHOUT_CODE, f"{name} belongs to no part"
        for other in imported(ast.parse(path.read_text())):
            if other.startswith("deep_ep_py") and part_of(other) not in {part, *IMPORTS[part]}:
                wrong.append(f"{name} imports {other}")
    assert not wrong
    assert parts == set(IMPORTS)


# The modules of each import the other, one of them for types only. No more may be added.
CIRCLES = {
    ("deep_ep_py.buffer", "deep_ep_py.v1.runtime"),
    ("deep_ep_py.session.engine", "deep_ep_py.session.opening"),
    ("deep_ep_py.transport.nvshmem.job", "deep_ep_py.transport.nvshmem.pool"),
    ("deep_ep_py.v2.handle", "deep_ep_py.v2.one_by_one"),
}


def test_no_modules_import_each_other() -> None:
    """Directly or by way of others, types included."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "deep_ep_py").rglob("*.py")
    }

    def module_of(name: str) -> str:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    found = {
        name: {module_of(other) for other in imported(ast.parse(path.read_text()), for_types=True)}
        - {"", "deep_ep_py", name}
        for name, path in paths.items()
    }

    def reached(begin: str) -> set[str]:
        seen, waiting = set[str](), [begin]
        while waiting:
            more = found[waiting.pop()] - seen
            seen |= more
            waiting += more
        return seen

    everywhere = {name: reached(name) for name in paths}
    assert {
        (one, other) for one in paths for other in everywhere[one] if one < other and one in everywhere[other]
    } == CIRCLES


def test_the_lists_of_kernels_agree() -> None:
    """The lists for the CPU, the stand-in and NVRTC agree on names, types, and which kernels are compiled per shape."""
    listed = re.search(r"Kernels<(.+?)>;", (CSRC / "kernels" / "registry.h").read_text(), re.DOTALL)
    assert listed is not None
    found = {}
    for space, struct in re.findall(r"(\w+::)?(\w+Kernel)", listed[1]):
        kernel = space + struct
        # A mode that has a namespace has a folder of the same name.
        folders = (
            [CSRC / "kernels" / space.strip(":")] if space else [CSRC / part for part in KERNELS if "_" not in part]
        )
        headers = "".join(path.read_text() for folder in folders for path in folder.glob("*.h"))
        body = re.search(rf"struct {struct} .*?\n}};", headers, re.DOTALL)
        assert body is not None, kernel
        name = re.search(r'kName = "(\w+)"', body[0])
        assert name is not None, kernel
        found[name[1]] = (f"deep_ep::{kernel}", "kOfAnyShape" not in body[0])
    assert found == {name: (kernel.type, kernel.takes_shape) for name, kernel in LISTED.items()}
