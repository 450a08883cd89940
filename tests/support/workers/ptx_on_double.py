"""Loads a PTX module with the library's launcher, over the stand-in for the driver. All threads of its kernel write to
the same word: prints the outcome.
"""

from __future__ import annotations

from deep_ep_py.base.native import C
from deep_ep_py.errors import CudaError
from ptx_programs import HEAD

NAME, SYMBOL = "handshake", "_ZN7deep_ep9handshakeE"  # the stand-in accepts launches of the library's kernels only
NO_SHAPE = (0, 0, 0)
TEXT = f"""\
// as NVRTC's texts begin
{HEAD}
.visible .entry {SYMBOL}(.param .align 8 .b8 given[40])
{{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [given];
    .loc 1 7 1
    st.global.u64 [%rd1], 7;
    ret;
}}
"""


def load(launcher: C.cuda.Launcher, text: str, symbol: str) -> None:
    launcher.load(NAME, NO_SHAPE, text.encode() + b"\0", symbol)


def refused(launcher: C.cuda.Launcher, text: str, symbol: str) -> str:
    try:
        load(launcher, text, symbol)
    except CudaError as error:
        return str(error)
    raise AssertionError("the driver accepted it")


def main() -> None:
    context = C.cuda.Context(0)
    launcher = C.cuda.Launcher(context, warps=1)
    words = C.cuda.Memory(context).pinned_words(1)
    assert "INVALID_PTX" in refused(launcher, TEXT.replace("st.global.u64", "st.global.u1"), SYMBOL)
    assert "finding" in refused(launcher, TEXT, SYMBOL + "x")
    load(launcher, TEXT, SYMBOL)
    try:
        launcher.wait(launcher.launch(NAME, NO_SHAPE, 1, 1, 0, words.address(0).to_bytes(8, "little") + bytes(32)))
    except RuntimeError as error:
        print(error)
    else:
        print("word", words.load(0))


if __name__ == "__main__":
    main()
