"""The parts of DeepEP's V1 `Buffer` interface other than the normal-mode calls."""
