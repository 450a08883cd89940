"""Build of deep_ep_py: pure Python plus one torch-free extension that needs only g++ (scripts/native_build.py).

`DEEP_EP_BUILDS` names the variants to build, "fast" by default; `python setup.py build_ext --inplace` is incremental.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import native_build  # noqa: E402


class BuildNative(build_ext):
    """The command that has native_build build each extension, one per variant."""

    def run(self) -> None:
        # The base class, when building in place, overwrites extensions that running processes have mapped.
        for ext in self.extensions:
            self.build_extension(ext)

    def build_extension(self, ext: Extension) -> None:
        variant = native_build.VARIANTS[ext.name.rpartition("_")[2]]
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            native_build.build_extension(variant, target, for_tests=self.inplace or self.editable_mode)
        except native_build.BuildError as error:
            raise CompileError(str(error)) from None


class BuildPython(build_py):
    """The command that puts headers into the wheel as deep_ep_py/csrc: kernels are compiled from them at run time."""

    def run(self) -> None:
        package = Path(self.build_lib) / "deep_ep_py"
        if not self.editable_mode and package.exists():
            shutil.rmtree(package)  # an earlier wheel may have left other variants and headers
        super().run()
        if self.editable_mode:
            return
        for folder in native_build.FOR_GPUS:
            for source in sorted((native_build.SOURCE_ROOT / folder).rglob("*.h")):
                target = package / "csrc" / source.relative_to(native_build.SOURCE_ROOT)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


setup(
    ext_modules=[Extension(f"deep_ep_py.{v.module}", sources=[]) for v in native_build.variants_from_env()],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
)
