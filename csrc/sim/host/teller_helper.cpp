#include "sim/host/teller_helper.h"

#include "sim/executor/executor.h"

namespace deep_ep::host {

TellerHelper::TellerHelper(const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory)
    : Teller(claimed, std::move(others), std::move(memory)) {
    helper_ = cpu::Executor::get().add_helper({[this] {
        if (due()) tell();
        return false;
    }});
}

TellerHelper::~TellerHelper() { cpu::Executor::get().remove_helper(helper_); }

}  // namespace deep_ep::host
