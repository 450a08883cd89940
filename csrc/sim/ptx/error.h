// An error in a module or in its execution, with the place where it occurred.
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
