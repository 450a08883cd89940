// The Teller of a rank whose kernels run on the executor, outside a world. They claim failures only while a thread runs
// them, and that thread passes the failures on.
#pragma once

#include "host/control/teller.h"

namespace deep_ep::host {

class TellerHelper final : public Teller {
  public:
    TellerHelper(const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory);
    ~TellerHelper() override;

  private:
    int helper_ = -1;
};

}  // namespace deep_ep::host
