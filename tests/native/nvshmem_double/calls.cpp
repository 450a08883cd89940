#include "calls.h"

#include <set>
#include <string>
#include <utility>

#include "arguments.h"

namespace nvshmem_double {
namespace {

// None of these is destroyed at the end of the process, because the NICs' thread may still run.
std::mutex& one_call_at_a_time = *new std::mutex;
int initialisations = 0;
std::set<std::string>& used_ids = *new std::set<std::string>;

struct Held {
    std::mutex mutex;
    std::shared_ptr<Pe> pe;
};
Held& held = *new Held;

void replace_pe(std::shared_ptr<Pe> pe) {
    const std::lock_guard<std::mutex> lock(held.mutex);
    held.pe = std::move(pe);
}

}  // namespace

// Joins processes that have already met; initializes the device if there was no GPU before.
void join(Pe& there) {
    const Gpu::Context context = Gpu::current_context();
    if (!there.initialised() && context != nullptr) there.initialise(context);
    ++initialisations;
}

void initialise(unsigned flags, const void* given) {
    const std::lock_guard<std::mutex> lock(one_call_at_a_time);
    const std::shared_ptr<Pe> there = the_pe();
    // Once processes have met, no arguments are needed.
    if (flags == 0 && there != nullptr) return join(*there);
    const Arguments arguments = read_arguments(golden(), flags, given);
    if (there != nullptr) {
        if (arguments.pe != there->number() || arguments.pes != there->pes()) {
            throw Failure(kInvalidValue, "PE " + std::to_string(arguments.pe) + " of " + std::to_string(arguments.pes) +
                                             " cannot join: it is PE " + std::to_string(there->number()) + " of " +
                                             std::to_string(there->pes()) + " already");
        }
        return join(*there);
    }
    if (!used_ids.insert(arguments.id).second) throw Failure(kInvalidValue, "the unique id has been used before");
    auto pe = std::make_shared<Pe>(arguments.id, arguments.pe, arguments.pes);
    if (Gpu::Context context = Gpu::current_context(); context != nullptr) pe->initialise(context);
    replace_pe(std::move(pe));
    initialisations = 1;
}

void finalise() {
    const std::lock_guard<std::mutex> lock(one_call_at_a_time);
    const std::shared_ptr<Pe> last = the_pe();
    if (last == nullptr) throw Failure(kInvalidValue, "called more often than nvshmemx_hostlib_init_attr");
    if (--initialisations > 0) return;
    replace_pe(nullptr);
    last->finalise();
}

std::shared_ptr<Pe> the_pe() {
    const std::lock_guard<std::mutex> lock(held.mutex);
    return held.pe;
}

int carry_out(const std::string& call, const std::function<void()>& body) {
    if (const int wanted = wanted_failure(call); wanted != 0) return wanted;
    try {
        body();
        return kSuccess;
    } catch (const Failure& failure) {
        const std::string why = failure.what();
        complain(why.rfind(call, 0) == 0 ? why : call + ": " + why);
        return failure.status();
    } catch (const std::exception& error) {
        complain(call + ": " + error.what());
        return kInternal;
    }
}

int carry_out_on_device(const std::string& call, const std::function<void(Pe&)>& body) {
    return carry_out(call, [&] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        const std::shared_ptr<Pe> pe = the_pe();
        if (pe == nullptr || !pe->initialised()) throw Failure(kInvalidValue, "before the device is initialized");
        body(*pe);
    });
}

int carry_out_collectively(const std::string& call, const std::function<void(Pe&)>& body) {
    return carry_out(call, [&] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        const std::shared_ptr<Pe> pe = the_pe();
        if (pe == nullptr) throw Failure(kInvalidValue, "before nvshmemx_hostlib_init_attr");
        if (!pe->initialised()) pe->initialise(Gpu::current_context());
        body(*pe);
    });
}

}  // namespace nvshmem_double
