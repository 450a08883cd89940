// The teller as an agent of the executor; used when all ranks are in this process.
#pragma once

#include "host/control/teller.h"

namespace deep_ep::host {

class TellerAgent final : public Teller {
  public:
    TellerAgent(int rank, const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory);
    ~TellerAgent() override;

  private:
    int agent_ = -1;
};

}  // namespace deep_ep::host
