"""Ask a compiler for the offsets in NVSHMEM's headers of the fields that csrc/wire/nvshmem.h reads, and store them.

python scripts/nvshmem_layouts.py                       writes VERSION.json for all known versions to the tests
python scripts/nvshmem_layouts.py --check 3.8.0         compares the file of one version instead
python scripts/nvshmem_layouts.py --wheels DIR 3.9.0    takes the wheel from DIR, or downloads it to DIR

For each version, the script gets the wheel with pip, compiles a small program against its headers, and looks up the
functions that this library calls in the host library. Golden files hold numbers under the field names of
csrc/wire/nvshmem.h; no text of NVSHMEM is stored. The script needs g++, nm, and the headers of rdma-core.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "support" / "data" / "nvshmem"
PACKAGE = "nvidia-nvshmem-cu13"
KNOWN = ("3.4.5", "3.5.21", "3.6.5", "3.7.2", "3.8.0")
HEADERS = (
    "device_host/nvshmem_types.h",
    "device_host_transport/nvshmem_common_ibgda.h",
    "device_host_transport/nvshmem_constants.h",
    "bootstrap_device_host/nvshmem_uniqueid.h",
)
HOST_LIBRARY = "nvidia/nvshmem/lib/libnvshmem_host.so.3"
INCLUDE = "nvidia/nvshmem/include"
VERBS_HEADER = "infiniband/mlx5dv.h"
VERSION_MACROS = tuple(f"NVSHMEM_VENDOR_{part}_VERSION" for part in ("MAJOR", "MINOR", "PATCH"))

# By our names: the NVSHMEM type, and for each of our fields the NVSHMEM member.
TABLES = {
    "DeviceState": (
        "nvshmemi_device_host_state_t",
        {
            "pe": "mype",
            "pes": "npes",
            "heap": "heap_base",
            "heap_bytes": "heap_size",
            "remote_heaps": "peer_heap_base_remote",
            "by_rails": "enable_rail_opt",
            "has_ibgda": "ibgda_is_initialized",
            "transport": "selected_device_transport",
        },
    ),
    "Key": ("nvshmemi_ibgda_device_key_t", {"key": "key", "end": "next_addr"}),
    "IbgdaState": (
        "nvshmemi_ibgda_device_state_t",
        {
            "rcs_per_pe": "num_rc_per_pe",
            "chunk_log2": "log2_cumem_granularity",
            "nics": "num_devices_initialized",
            "cpu_rings": "use_async_postsend",
            "keys": "constmem.lkeys",
            "remote_keys": "constmem.rkeys",
            "queue_pairs": "globalmem.rcs",
            "more_keys": "globalmem.lkeys",
            "more_remote_keys": "globalmem.rkeys",
            "default_rcs_per_pe": "num_default_rc_per_pe",
        },
    ),
    "QueuePair": (
        "nvshmemi_ibgda_device_qp_t",
        {
            "kind": "qp_type",
            "number": "qpn",
            "nic": "dev_idx",
            "returned": "ibuf.buf",
            "returned_key": "ibuf.lkey",
            "blocks": "tx_wq.nwqes",
            "ring": "tx_wq.wqe",
            "record": "tx_wq.dbrec",
            "doorbell": "tx_wq.bf",
            "completion": "tx_wq.cq",
            "posting": "mvars.post_send_lock",
            "reserved": "mvars.tx_wq.resv_head",
            "filled": "mvars.tx_wq.ready_head",
            "rung": "mvars.tx_wq.prod_idx",
            "completed": "mvars.tx_wq.cons_idx",
        },
    ),
    "CompletionQueue": ("nvshmemi_ibgda_device_cq_t", {"cqe": "cqe"}),
    # Arguments of the functions of the host library.
    "UniqueId": ("nvshmemx_uniqueid_t", {"version": "version"}),
    "UniqueIdArguments": ("nvshmemx_uniqueid_args_t", {"id": "id", "pe": "myrank", "pes": "nranks"}),
    "InitArguments": (
        "nvshmemx_init_attr_t",
        {
            "version": "version",
            "communicator": "mpi_comm",
            "arguments_version": "args.version",
            "unique_id_version": "args.uid_args.version",
            "unique_id": "args.uid_args.id",
            "pe": "args.uid_args.myrank",
            "pes": "args.uid_args.nranks",
            "device": "args.cuda_device_id",
        },
    ),
}
VALUES = {
    "kProxy": "NVSHMEMI_DEVICE_TRANSPORT_TYPE_PROXY",
    "kIbgda": "NVSHMEMI_DEVICE_TRANSPORT_TYPE_IBGDA",
    "kGpuNetIo": "NVSHMEMI_DEVICE_TRANSPORT_TYPE_GPUNETIO_GDAKI",
    "kDci": "NVSHMEMI_IBGDA_DEVICE_QP_TYPE_DCI",
    "kDct": "NVSHMEMI_IBGDA_DEVICE_QP_TYPE_DCT",
    "kRc": "NVSHMEMI_IBGDA_DEVICE_QP_TYPE_RC",
    "kNoNumber": "NVSHMEMI_IBGDA_USCALAR_INVALID",
    "kNotInitialized": "NVSHMEM_STATUS_NOT_INITIALIZED",
    "kBootstrapped": "NVSHMEM_STATUS_IS_BOOTSTRAPPED",
    "kInitialized": "NVSHMEM_STATUS_IS_INITIALIZED",
    "kLimitedMpg": "NVSHMEM_STATUS_LIMITED_MPG",
    "kFullMpg": "NVSHMEM_STATUS_FULL_MPG",
    "kMaxNics": "NVSHMEMI_IBGDA_MAX_DEVICES_PER_PE",
    "kKeysInState": "NVSHMEMI_IBGDA_MAX_CONST_LKEYS",
    "kMaxBlocks": "NVSHMEMI_IBGDA_MAX_QP_DEPTH",
    "kSlotBytes": "NVSHMEMI_IBGDA_IBUF_SLOT_SIZE",
}
# The versions that introduced names missing from the oldest version; earlier versions must not have them.
SINCE = {
    "DeviceState.transport": (3, 6),
    "IbgdaState.default_rcs_per_pe": (3, 5),
    "InitArguments.device": (3, 5),
    "kProxy": (3, 6),
    "kIbgda": (3, 6),
    "kGpuNetIo": (3, 7),
    "nvshmemx_qp_create": (3, 5),
}
# The functions that this library calls, and the others that the stand-in for NVSHMEM has.
FUNCTIONS = (
    *("nvshmem_align", "nvshmem_free", "nvshmem_malloc", "nvshmem_my_pe", "nvshmem_n_pes", "nvshmem_ptr"),
    *("nvshmemx_cumodule_finalize", "nvshmemx_cumodule_init", "nvshmemx_get_uniqueid", "nvshmemx_hostlib_finalize"),
    *("nvshmemx_hostlib_init_attr", "nvshmemx_init_status", "nvshmemx_qp_create", "nvshmemx_set_attr_uniqueid_args"),
    "nvshmemx_vendor_get_version_info",
)

PROGRAM = """\
#include <cstddef>
#include <cstdint>
#include <cstdio>
{includes}
#define SAY(table, field, type, member) \\
    std::printf("%s.%s %zu %zu\\n", table, field, offsetof(type, member), sizeof(((type*)nullptr)->member))
#define IS_THERE(name, member) template <class T> constexpr bool name = requires(T state) {{ state.member; }}
{checks}
int main() {{
    std::printf("version %d.%d.%d\\n", {version});
{lines}
}}
"""


@dataclass(frozen=True)
class Version:
    """A release, by the version in the name of its wheel."""

    text: str

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.text.split(".")))

    def has(self, name: str) -> bool:
        return self.numbers >= SINCE.get(name, ())


def program(version: Version) -> str:
    """Return C++ that prints the size of each table, offset and size of each field, and each value, one per line."""
    lines, checks = [], []
    for table, (kind, fields) in TABLES.items():
        lines.append(f'    std::printf("{table} %zu\\n", sizeof({kind}));')
        for field, member in fields.items():
            if version.has(f"{table}.{field}"):
                lines.append(f'    SAY("{table}", "{field}", {kind}, {member});')
            else:
                checks.append(f"IS_THERE(has_{field}, {member});")
                checks.append(f'static_assert(!has_{field}<{kind}>, "{table}.{field} is there already");')
    for name, value in VALUES.items():
        if version.has(name):
            lines.append(f'    std::printf("{name} %u\\n", static_cast<unsigned>({value}));')
    includes = "\n".join(f"#include <{header}>" for header in HEADERS)
    macros = ", ".join(VERSION_MACROS)
    return PROGRAM.format(includes=includes, checks="\n".join(checks), version=macros, lines="\n".join(lines))


def check_tools() -> None:
    """Raise if this machine lacks what the headers of a wheel need."""
    for tool, package in (("g++", "g++"), ("nm", "binutils")):
        if shutil.which(tool) is None:
            raise click.ClickException(f"{tool} was not found. Debian: apt-get install {package}")
    text = f"#include <{VERBS_HEADER}>\n"
    done = subprocess.run(["g++", "-x", "c++", "-E", "-"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(
            f"NVSHMEM's headers include <{VERBS_HEADER}> of rdma-core, which was not found. "
            "Debian: apt-get install libibverbs-dev; Fedora: dnf install rdma-core-devel"
        )


def find_wheel(version: Version, folder: Path, download: bool) -> Path:
    """Return the wheel of a version in `folder`; download it there if it is missing and downloads are allowed."""
    pattern = f"{PACKAGE.replace('-', '_')}-{version.text}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found and download:
        requirement = f"{PACKAGE}=={version.text}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise click.ClickException(f"pip could not download {requirement}:\n{done.stderr.strip()}")
        found = sorted(folder.glob(pattern))
    if not found:
        raise click.ClickException(f"no {pattern} in {folder}")
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the headers and the host library; nothing else is needed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{INCLUDE}/") or name == HOST_LIBRARY]
        if HOST_LIBRARY not in names:
            raise click.ClickException(f"{wheel.name} has no {HOST_LIBRARY}")
        archive.extractall(folder, names)


def numbers(version: Version, folder: Path) -> dict[str, int | list[int]]:
    """Return the output of the program: the size of a table or a value as a number, a field as [offset, size]."""
    source, target = folder / "layout.cpp", folder / "layout"
    source.write_text(program(version))
    command = [
        "g++",
        "-std=c++20",
        "-Wno-invalid-offsetof",
        f"-isystem{folder / INCLUDE}",
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(
            f"a field or value of {version.text} is not as {Path(__file__).name} expects:\n{done.stderr}"
        )
    said: dict[str, int | list[int]] = {}
    for line in subprocess.check_output([target], text=True).splitlines():
        name, *rest = line.split()
        if name == "version":
            if rest != [version.text]:
                raise click.ClickException(f"the wheel of {version.text} has the headers of {rest[0]}")
        else:
            said[name] = int(rest[0]) if len(rest) == 1 else [int(rest[0]), int(rest[1])]
    return said


def functions(version: Version, folder: Path) -> list[str]:
    """Return the functions that the host library exports; raise if one is missing or is there before its version."""
    listed = subprocess.check_output(["nm", "-D", "--defined-only", folder / HOST_LIBRARY], text=True)
    exported = set(re.findall(r" [TW] (\w+)", listed))
    for name in FUNCTIONS:
        if (name in exported) != version.has(name):
            there = "exports" if name in exported else "does not export"
            raise click.ClickException(f"{Path(HOST_LIBRARY).name} of {version.text} {there} {name}")
    return [name for name in FUNCTIONS if name in exported]


def as_text(version: Version, said: dict[str, int | list[int]], exported: list[str]) -> str:
    """Return a golden file with one line per name, the only form of JSON that tests/native/nvshmem_double reads."""
    entries = [f'  "version": "{version.text}"', *(f'  "{name}": {json.dumps(value)}' for name, value in said.items())]
    return "{\n" + ",\n".join([*entries, f'  "functions": {json.dumps(exported)}']) + "\n}\n"


def differences(kept: str, found: str) -> list[str]:
    """Return one line for each name whose values differ."""
    before, after = json.loads(kept), json.loads(found)
    names = list(dict.fromkeys([*before, *after]))
    return [
        f"{name}: {before.get(name)} is stored, {after.get(name)} was found"
        for name in names
        if before.get(name) != after.get(name)
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.argument("versions", nargs=-1, metavar="[VERSION]...")
@click.option("--check", is_flag=True, help="Compare the golden files instead of writing them.")
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take wheels from this folder, and download missing ones to it.",
)
@click.option("--offline", is_flag=True, help="Download nothing.")
def main(versions: tuple[str, ...], check: bool, wheels: Path | None, offline: bool) -> None:
    """Write or compare the golden files; the exit code is 1 if one differs."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for text in versions:
        if not re.fullmatch(r"\d+\.\d+\.\d+", text):
            raise click.UsageError(f"{text}: expected a version such as {KNOWN[-1]}")
    check_tools()
    differing = 0
    for version in map(Version, versions or KNOWN):
        with tempfile.TemporaryDirectory() as made, console.status(f"{version.text}: the wheel") as status:
            folder = Path(made)
            wheel = find_wheel(version, wheels or folder, not offline)
            status.update(f"{version.text}: unpacking {wheel.name}")
            unpack(wheel, folder)
            status.update(f"{version.text}: compiling")
            text = as_text(version, numbers(version, folder), functions(version, folder))
        golden = GOLDEN / f"{version.text}.json"
        if not check:
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
            console.print(f"{version.text}: {golden.relative_to(ROOT)} has been written")
        elif not golden.exists():
            raise click.ClickException(f"{golden.relative_to(ROOT)} does not exist; run without --check")
        else:
            wrong = differences(golden.read_text(), text)
            differing += bool(wrong)
            console.print(f"{version.text}: {'differs' if wrong else 'unchanged'}", *wrong, sep="\n  ")
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
