// Kernels of a few lines, one per ability of the executor. Their own file is instrumented by sanitizers, unlike
// bindings.
#pragma once

#include <map>
#include <string>

#include "sim/executor/executor.h"
#include "wire/types.h"

namespace selftest {

using namespace deep_ep;

struct Args {
    u64* word;
    u64 value;
    u64 deadline;
    u64* result;
};

extern const std::map<std::string, cpu::Entry> kKernels;

// An agent: whenever the word grows, it adds the same amount to the next one.
void echo(u64* word);

}  // namespace selftest
