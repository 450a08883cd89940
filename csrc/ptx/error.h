// What is wrong with a module, or with what it does, and where.
#pragma once

#include <stdexcept>
#include <string>

#include "wire/types.h"

namespace deep_ep::ptx {

class PtxError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace deep_ep::ptx
