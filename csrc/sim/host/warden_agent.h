// The warden as an agent of the executor; used when all ranks are in this process.
#pragma once

#include "host/control/warden.h"

namespace deep_ep::host {

class WardenAgent final : public Warden {
  public:
    WardenAgent(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control);
    ~WardenAgent() override;

  private:
    int agent_ = -1;
};

}  // namespace deep_ep::host
