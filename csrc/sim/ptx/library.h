// The kernels that are loaded as PTX, by name and shape.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "sim/ptx/kernel.h"

namespace deep_ep::ptx {

class Library {
  public:
    // Ranks, row bytes and top-k that a kernel is compiled for; zeros for one that is compiled for all.
    using Shape = std::tuple<u32, u32, u32>;

    void add(const std::string& name, const Shape& shape, std::string symbol, std::shared_ptr<const Image> image);
    bool has(const std::string& name, const Shape& shape) const { return kernels_.count({name, shape}) != 0; }
    // Like `prepare`, for a launch that has the kernel's name, arguments and dynamic shared memory. Throws PtxError if
    // there is no such kernel.
    void find(cpu::Launch& launch, const Shape& shape, std::string& held) const;

  private:
    struct Kernel {
        std::string symbol;
        std::shared_ptr<const Image> image;
    };
    std::map<std::pair<std::string, Shape>, Kernel> kernels_;
};

}  // namespace deep_ep::ptx
