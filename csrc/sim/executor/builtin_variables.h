// CUDA's built-in variables. The scheduler sets them whenever it resumes a fiber; kernels only read them.
#pragma once

struct BuiltinIndex {
    unsigned x, y, z;
};

extern BuiltinIndex threadIdx __attribute__((visibility("hidden")));
extern BuiltinIndex blockIdx __attribute__((visibility("hidden")));
extern BuiltinIndex blockDim __attribute__((visibility("hidden")));
extern BuiltinIndex gridDim __attribute__((visibility("hidden")));
