#include "host/cuda/gathering.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <tuple>
#include <utility>

namespace deep_ep::host {
namespace {

bool same_launch(const Gathering::Part& one, const Gathering::Part& other) {
    const auto all = [](const Gathering::Part& part) {
        return std::make_tuple(part.kernel, part.shape.ranks_, part.shape.row_bytes_, part.shape.topk_, part.blocks,
                               part.warps, part.shared_bytes, part.args.size());
    };
    return all(one) == all(other);
}

std::string described(const Gathering::Part& part) {
    std::ostringstream text;
    text << part.kernel << " for " << part.shape.ranks_ << " ranks, rows of " << part.shape.row_bytes_
         << " bytes and top-" << part.shape.topk_ << ", " << part.blocks
         << (part.blocks == 1 ? " block of " : " blocks of ") << part.warps << " warps with " << part.shared_bytes
         << " bytes of shared memory";
    return text.str();
}

std::string listed(const std::vector<size_t>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    return text;
}

}  // namespace

Gathering::Gathering(const std::shared_ptr<const cuda::PrimaryContext>& context, unsigned ranks, unsigned warps,
                     uint32_t copies_bytes, bool cooperative)
    : ranks_(ranks),
      launcher_(context, ranks, warps, copies_bytes, cooperative, nullptr),
      memory_(context),
      round_(std::make_shared<Round>()),
      left_(ranks) {
    round_->parts.resize(ranks_);
}

uint64_t Gathering::launch(unsigned rank, Part part, uint64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (broken_) std::rethrow_exception(broken_);
    if (launcher_.capturing()) {
        throw GatheringError("rank " + std::to_string(rank) + " came with " + part.kernel +
                             " in a capture: launches of all ranks at once cannot become part of one rank's graph");
    }
    const std::shared_ptr<Round> round = round_;
    round->parts[rank] = std::move(part);
    ++round->arrived;
    if (hopeless(*round)) {
        break_off(*round, " had not come yet");
    } else if (round->arrived == ranks_) {
        launch_all(*round);
    } else {
        wait(lock, *round, timeout_ns);
    }
    if (round->failure) std::rethrow_exception(round->failure);
    return round->serial;
}

// Whether the round can never complete.
bool Gathering::hopeless(const Round& round) const {
    const Part* first = nullptr;
    for (size_t rank = 0; rank < ranks_; ++rank) {
        const std::optional<Part>& part = round.parts[rank];
        if (!part && left_[rank]) return true;
        if (!part) continue;
        if (first != nullptr && !same_launch(*first, *part)) return true;
        first = &*part;
    }
    return false;
}

void Gathering::launch_all(Round& round) {
    round_ = std::make_shared<Round>();
    round_->parts.resize(ranks_);
    try {
        const Part& part = *round.parts.front();
        Array& array = take_array(ranks_ * part.args.size());
        char* place = static_cast<char*>(array.memory.get());
        for (const std::optional<Part>& each : round.parts) {
            std::memcpy(place, each->args.data(), each->args.size());
            place += each->args.size();
        }
        round.serial = launcher_.launch_for_ranks(part.kernel, part.shape, part.blocks, ranks_, part.warps,
                                                  part.shared_bytes, array.memory.get());
        array.serial = round.serial;
    } catch (...) {
        round.failure = std::current_exception();
    }
    round.over = true;
    over_.notify_all();
}

// Returns an array of exactly the requested size that no running launch uses.
Gathering::Array& Gathering::take_array(size_t bytes) {
    for (Array& array : arrays_) {
        if (array.bytes == bytes && launcher_.finished(array.serial)) return array;
    }
    return arrays_.emplace_back(Array{bytes, memory_.make_shared(bytes), 0});
}

void Gathering::wait(std::unique_lock<std::mutex>& lock, Round& round, uint64_t timeout_ns) {
    // The rank that makes the launch holds the lock meanwhile, so the timeout covers only ranks that have not come.
    const std::chrono::nanoseconds timeout(timeout_ns);
    if (over_.wait_for(lock, timeout, [&] { return round.over; })) return;
    std::ostringstream missing;
    missing << " did not come within " << std::chrono::duration<double>(timeout).count() << " s";
    break_off(round, missing.str());
}

void Gathering::break_off(Round& round, const std::string& missing) {
    round.failure = broken_ = std::make_exception_ptr(GatheringError(who_came(round, missing)));
    round.over = true;
    over_.notify_all();
}

std::string Gathering::who_came(const Round& round, const std::string& missing) const {
    std::vector<std::pair<std::string, std::vector<size_t>>> groups;
    const auto add = [&](size_t rank, const std::string& what) {
        const auto found =
            std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == what; });
        if (found != groups.end()) return found->second.push_back(rank);
        groups.push_back({what, {rank}});
    };
    for (size_t rank = 0; rank < ranks_; ++rank) {
        if (const std::optional<Part>& part = round.parts[rank]) {
            add(rank, " came with " + described(*part));
        } else {
            add(rank, left_[rank] ? " will not come again" : missing);
        }
    }
    std::string text =
        "all " + std::to_string(ranks_) + " ranks go to the GPU in one launch, expected the same of each: ";
    for (size_t i = 0; i < groups.size(); ++i)
        text += (i == 0 ? "" : "; ") + listed(groups[i].second) + groups[i].first;
    return text;
}

void Gathering::leave(unsigned rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_.at(rank) = true;
    if (round_->arrived != 0 && !round_->over) break_off(*round_, " had not come yet");
}

void Gathering::load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
                     const std::string& symbol) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!launcher_.loaded(name, shape)) launcher_.load(name, shape, cubin, symbol);
}

bool Gathering::loaded(const std::string& name, const RuntimeShape& shape) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return launcher_.loaded(name, shape);
}

bool Gathering::finished(uint64_t serial) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return launcher_.finished(serial);
}

void Gathering::keep_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    launcher_.keep_stream();
}

void Gathering::check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    launcher_.check();
}

GatheredLauncher::GatheredLauncher(std::shared_ptr<Gathering> gathering, unsigned rank, uint64_t timeout_ns)
    : gathering_(std::move(gathering)), rank_(rank), timeout_ns_(timeout_ns) {
    if (rank < gathering_->ranks()) return;
    throw std::invalid_argument("rank=" + std::to_string(rank) + ": expected 0 to " +
                                std::to_string(gathering_->ranks() - 1));
}

void GatheredLauncher::load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
                            const std::string& symbol) {
    gathering_->load(name, shape, cubin, symbol);
}

bool GatheredLauncher::loaded(const std::string& name, const RuntimeShape& shape) const {
    return gathering_->loaded(name, shape);
}

uint64_t GatheredLauncher::launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                                  size_t shared_bytes, const void* args, size_t args_bytes) {
    std::string bytes(static_cast<const char*>(args), args_bytes);
    return gathering_->launch(rank_, {kernel, shape, blocks, warps, shared_bytes, std::move(bytes)}, timeout_ns_);
}

}  // namespace deep_ep::host
