"""A cache of compiled kernels on disk, so that a kernel is compiled once per machine, not once per process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from deep_ep_py.base.sources import sources_hash
from deep_ep_py.device.jit.compiler import OPTIONS, CompiledKernel, compile_kernel, nvrtc_version, source_of
from deep_ep_py.device.jit.registry import Kernel, Shape
from deep_ep_py.device.jit.resources import Resources

FOLDER_VARIABLE = "DEEP_EP_CACHE_DIR"
"""The environment variable for the cache's folder."""

_log = logging.getLogger("deep_ep_py")

Compile = Callable[[Kernel, Shape, str], CompiledKernel]

# Kernels include only headers from these folders; the rest of csrc/ does not affect them.
_SUFFIX = ".kernel"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> Path:
    """Return the folder for compiled kernels: `DEEP_EP_CACHE_DIR`, or else deep_ep_py in the user's cache folder.

    In containers, users may have no cache folder, or one that others may write: then it is a folder of their own among
    the temporary files.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    try:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deep_ep_py"
        make_folder(usual)
        return usual
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return _spare_folder(tempfile.gettempdir(), str(error))


@functools.cache
def _spare_folder(temporary: str, why: str) -> Path:
    """Make a folder among the temporary files, which this user's processes share unless another user has its name."""
    spare = Path(temporary) / f"deep_ep_py-{os.getuid()}"
    try:
        make_folder(spare)
    except OSError:
        spare = Path(tempfile.mkdtemp(prefix="deep_ep_py-"))
    _log.warning("compiled kernels are kept in %s: %s; %s sets another folder", spare, why, FOLDER_VARIABLE)
    return spare


def make_folder(folder: Path) -> None:
    """Make a folder for compiled kernels unless it exists, for this user only.

    Raises
    ------
    OSError
        It cannot be made, or others may write it (see `refuse_if_others_may_write`).
    """
    # Whatever the umask, as XDG requires for all caches.
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    refuse_if_others_may_write(folder)


def refuse_if_others_may_write(folder: Path) -> None:
    """Refuse a folder whose files another user could replace, since they are run on GPUs.

    The folder and all its parents are checked, with links resolved: each must belong to this user or to root, and must
    not be writable for its group or others. For the parents, a sticky bit, as on /tmp, is sufficient: then only the
    owner of an entry can move it. In a user namespace, parents may belong to users that are not mapped into it, as root
    is not where only this user is.

    Parameters
    ----------
    folder
        An existing folder.

    Raises
    ------
    PermissionError
        The message names the folder that others may write.
    """
    real = folder.resolve(strict=True)
    for part in (real, *real.parents):
        found = part.stat()
        sticky = part != real and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) and (part == real or not _is_unmapped(found.st_uid)):
            why = f"{part} belongs to user {found.st_uid}"
        elif found.st_mode & _OTHERS_WRITE and not sticky:
            why = f"other users may write {part} (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            continue
        raise PermissionError(
            f"{folder}: expected a folder for compiled kernels that no other user can write, but {why}; "
            f"chmod go-w it, or set {FOLDER_VARIABLE} to another"
        )


def _is_unmapped(uid: int) -> bool:
    """Return whether this id stands for all users that are not mapped into this user namespace."""
    try:
        if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return False
        mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return False
    return not any(first <= uid < first + count for first, _, count in mapped)


class KernelCache:
    """Compiled kernels, keyed by sources, shape, architecture, options and NVRTC version.

    Any number of processes may use one folder. If several need the same kernel at once, one compiles it and the others
    wait; if that one is killed, the next one compiles. A file is either complete or absent.

    Parameters
    ----------
    folder
        The folder of the files; created with the first file, for this user only. Refused if others may write it.
    compile_
        Compiles a kernel that is not in the cache.
    """

    def __init__(self, folder: Path | None = None, compile_: Compile = compile_kernel) -> None:
        self.folder = default_folder() if folder is None else folder
        self._compile = compile_

    def get(self, kernel: Kernel, shape: Shape, architecture: str) -> CompiledKernel:
        """Return one kernel, like `get_all` with a single one."""
        return self.get_all([kernel], shape, architecture)[0]

    def get_all(
        self, kernels: Iterable[Kernel], shape: Shape, architecture: str, start: int = 0
    ) -> list[CompiledKernel]:
        """Return kernels, compiling those that are not in the cache.

        Parameters
        ----------
        kernels, shape, architecture
            As in `compile_kernel`.
        start
            Index of the kernel to begin with. Processes that begin with different kernels share the work.

        Returns
        -------
        list of CompiledKernel
            In the order of `kernels`.

        Raises
        ------
        CompileError, NvrtcUnavailableError
            As `compile_kernel`.
        OSError
            The folder cannot be written, or others may write it (see `refuse_if_others_may_write`).
        """
        wanted = list(kernels)
        make_folder(self.folder)
        paths = [self.path(kernel, shape, architecture) for kernel in wanted]
        found = {i: there for i, path in enumerate(paths) if (there := _read(path)) is not None}
        order = [i % len(wanted) for i in range(start, start + len(wanted))]
        # First compile those that no other process is compiling, then wait for the others.
        for patience in (0, -1):
            for i in order:
                if i not in found:
                    made = self._make(paths[i], wanted[i], shape, architecture, patience)
                    if made is not None:
                        found[i] = made
        return [found[i] for i in range(len(wanted))]

    def path(self, kernel: Kernel, shape: Shape, architecture: str) -> Path:
        """Return the path of a kernel's file, which need not exist."""
        program = (source_of(kernel, shape, architecture), kernel.expression_for(shape))
        parts = (sources_hash(), *program, architecture, json.dumps(OPTIONS), nvrtc_version())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        return self.folder / f"{kernel.name}-{architecture}-{key}{_SUFFIX}"

    def _make(
        self, path: Path, kernel: Kernel, shape: Shape, architecture: str, patience: float
    ) -> CompiledKernel | None:
        """Compile a kernel unless another process is; None if that takes longer than `patience` seconds."""
        # The lock is an OS lock: it is released when the process that holds it ends, for whatever reason.
        try:
            with FileLock(path.with_suffix(".lock"), timeout=patience, mode=0o600):
                compiled = _read(path)
                if compiled is None:
                    compiled = self._compile(kernel, shape, architecture)
                    _write(path, compiled)
                return compiled
        except Timeout:
            return None


def _write(path: Path, kernel: CompiledKernel) -> None:
    """Write a line of JSON and the cubin; a reader of `path` finds either both or no file."""
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel) if field.name != "cubin"}
    fields["resources"] = dataclasses.asdict(kernel.resources)
    fields["sha256"] = hashlib.sha256(kernel.cubin).hexdigest()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        file.write(json.dumps(fields).encode() + b"\n" + kernel.cubin)
    os.replace(file.name, path)


def _read(path: Path) -> CompiledKernel | None:
    """Read a file written by `_write`.

    Returns None if it does not exist, has other contents, or may have been written by another user while the folder was
    open to others.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.getuid(), 0) or found.st_mode & _OTHERS_WRITE:
                return None
            line, _, cubin = file.read().partition(b"\n")
        fields = json.loads(line)
        if fields.pop("sha256") != hashlib.sha256(cubin).hexdigest():
            return None
        return CompiledKernel(**{**fields, "resources": Resources(**fields["resources"]), "cubin": cubin})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
