#include "machines.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../program.h"
#include "host/control/machines/machines_control.h"
#include "host/heap/address_page.h"
#include "host/heap/host_word.h"
#include "sim/host/memory.h"

namespace protocol::machines {

using namespace deep_ep;
using namespace deep_ep::host;
using namespace deep_ep::wire::control;
using planted::expect;

namespace {

constexpr int kRanks = 3, kMeshes = 20, kRepeats = 20;
constexpr int kAlone = 2;  // the rank on a machine of its own; the others share one
constexpr wire::HeapLayout kLayout{kRanks, 2, 4096, 4096};

TagKey key_of(int from, int to) { return {{static_cast<u64>(from) + 1, static_cast<u64>(to) + 1}}; }

bool within(const std::function<bool()>& holds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::yield();
    }
    return true;
}

// Delays its stores, so that operations required to follow a store do.
class LateMemory final : public CpuMemory {
  public:
    void release_words(const std::vector<uint64_t*>& words, uint64_t value) override {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        CpuMemory::release_words(words, value);
    }
};

// A teller that tells on request.
class ToldTeller final : public Teller {
  public:
    ToldTeller(const uint64_t* claimed, Others others)
        : Teller(claimed, std::move(others), std::make_unique<CpuMemory>()) {}
    ~ToldTeller() override {
        if (due()) tell();
    }
};

struct World {
    CpuMemory memory;
    std::vector<std::shared_ptr<u8>> own;  // by rank: its control pages, as its machine maps them
    std::vector<std::shared_ptr<u8>> copies[kRanks];
    std::shared_ptr<Mesh> meshes[kRanks];
    std::unique_ptr<MachinesControl> controls[kRanks];

    static bool far(int a, int b) { return (a == kAlone) != (b == kAlone); }

    std::shared_ptr<u8> pages() { return std::static_pointer_cast<u8>(memory.make_private(kLayout.control_bytes())); }

    World() {
        for (int rank = 0; rank < kRanks; ++rank) own.push_back(pages());
        int sockets[kRanks][kRanks];
        for (int a = 0; a < kRanks; ++a) {
            for (int b = a + 1; b < kRanks; ++b) {
                int pair[2];
                if (!far(a, b)) continue;
                expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "no sockets");
                sockets[a][b] = pair[0];
                sockets[b][a] = pair[1];
            }
        }
        for (int a = 0; a < kRanks; ++a) {
            std::vector<Mesh::End> ends;
            for (int b = 0; b < kRanks; ++b) {
                copies[a].push_back(far(a, b) ? pages() : own[static_cast<size_t>(b)]);
                if (far(a, b)) ends.push_back({b, sockets[a][b], b == kAlone ? "b" : "a", key_of(a, b), key_of(b, a)});
            }
            meshes[a] = std::make_shared<Mesh>(ends);
            for (const Mesh::End& end : ends) close(end.socket);
        }
        for (int rank = 0; rank < kRanks; ++rank) {
            const auto make_teller = [](const uint64_t* claimed, Teller::Others others) {
                return std::make_unique<ToldTeller>(claimed, std::move(others));
            };
            controls[rank] =
                std::make_unique<MachinesControl>(rank, copies[rank], NearParts(), kLayout, memory, make_teller,
                                                  meshes[rank], std::make_unique<LateMemory>());
        }
    }
    // Closes connections as the end of a process does.
    void end(int rank) {
        controls[rank].reset();
        meshes[rank].reset();
    }
};

// A failure is known everywhere when its teller continues (P12), and a kernel's claim reaches all ranks that kernels do
// not.
void failures(World& world, std::mt19937_64& random) {
    for (uint32_t generation = 1; generation <= kRepeats; ++generation) {
        const int from = static_cast<int>(random() % kRanks);
        const u64 word = wire::abort_word(generation, wire::kException, static_cast<u32>(from), -1);
        world.controls[from]->tell_failure(word, generation);
        for (const auto& control : world.controls) {
            expect(control->failure(generation) == word, "the rank that failed continues before another was notified");
        }
        const uint64_t claimed = wire::abort_word(generation, wire::kTimeout, 0, 1);
        world.controls[0]->make_teller(&claimed, generation, {kAlone}).reset();
        expect(within([&] { return world.controls[kAlone]->failure(generation) == claimed; }),
               "a claim is not announced");
    }
}

// Where a stage is visible, so is its mask, and the address of the endpoint that was made before it (P16).
void recoveries(World& world, std::mt19937_64& random) {
    auto& page = *reinterpret_cast<wire::NetworkAddress*>(world.own[kAlone].get() + kLayout.address_offset());
    for (u64 stage = 1; stage <= kRepeats; ++stage) {
        wire::RankMask mask{};
        mask.words[0] = random();
        u8 address[64];
        for (u8& byte : address) byte = static_cast<u8>(stage);
        AddressPage(page, stage).publish(address, sizeof(address));
        world.controls[kAlone]->tell_address();
        world.controls[kAlone]->tell_stage(mask, stage);
        for (const int rank : {0, 1}) {
            expect(within([&] { return world.controls[rank]->stage_of(kAlone).stage == stage; }), "no stage arrives");
            expect(world.controls[rank]->stage_of(kAlone).mask.words[0] == mask.words[0],
                   "a stage is visible before its mask");
            u8 found[64];
            auto& copy =
                *reinterpret_cast<wire::NetworkAddress*>(world.copies[rank][kAlone].get() + kLayout.address_offset());
            expect(AddressPage(copy, stage).read(found, sizeof(found)) && found[63] == stage,
                   "a stage is visible before the address");
        }
    }
}

// A rank's announcement in the previous generation does not count in this one, whenever it arrives.
void announcements(World& world) {
    auto& announced = reinterpret_cast<wire::HeapHeader*>(world.own[kAlone].get())->announcement;
    MachinesControl& here = *world.controls[0];
    const auto say = [&](u64 word) {
        world.memory.store_words({host_word(announced)}, word);
        world.meshes[kAlone]->tell_beat();
    };
    say(7);
    expect(within([&] { return here.announcement(kAlone) == 7; }), "an announcement does not arrive");
    here.clear_announcement(2);
    expect(here.announcement(kAlone) == 0, "an announcement of the previous generation counts");
    say(8);
    world.controls[kAlone]->tell_failure(1, 1);  // which arrives after it
    expect(here.announcement(kAlone) == 0, "an announcement of the previous generation counts");
    world.controls[kAlone]->clear_announcement(2);
    say(9);
    expect(within([&] { return here.announcement(kAlone) == 9; }), "an announcement does not arrive");
}

void states(World& world) {
    world.controls[kAlone]->set_compiling(true);
    expect(within([&] { return world.controls[0]->compiling(kAlone); }), "a rank that compiles does not announce it");
    world.meshes[0]->tell(kBeat, Beat{1, 0, 0, 1});
    world.meshes[0]->tell(kBeat, Beat{1, 0, 0, 0});  // made before it left
    expect(within([&] { return world.controls[kAlone]->left(0); }), "a rank that has left does not announce it");
    world.controls[0]->tell_failure(1, 1);
    expect(world.controls[kAlone]->left(0), "a rank that has left is back");
    expect(!world.controls[0]->left(kAlone) && !world.controls[0]->ended(kAlone),
           "a rank that is present counts as left");
}

// That a rank has left in good order is known as soon as it is known that it has ended.
enum Leaving { kWell, kInHaste, kNotAtAll };
void leaves(World& world, Leaving how) {
    const bool well = how != kNotAtAll;
    std::thread leaving([&] {
        if (how == kWell) world.controls[kAlone]->leave();
        if (how == kInHaste) world.meshes[kAlone]->tell(kBeat, Beat{1, 0, 0, 1});  // without waiting for an answer
        world.end(kAlone);
    });
    const bool ended = within([&] { return world.controls[0]->ended(kAlone); });
    const bool left = world.controls[0]->left(kAlone);
    leaving.join();
    expect(ended && world.controls[0]->gone(kAlone), "an end is not detected");
    expect(left == well, well ? "a rank that has left counts as dead" : "a rank that died counts as left");
}

// An attacker who injects frames into a connection in transit does not know the key.
void forgeries(bool repeated) {
    CpuMemory memory;
    std::vector<std::shared_ptr<u8>> pages;
    for (int rank = 0; rank < 2; ++rank) {
        pages.push_back(std::static_pointer_cast<u8>(memory.make_private(kLayout.control_bytes())));
    }
    int pair[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "no sockets");
    const auto mesh = std::make_shared<Mesh>(std::vector<Mesh::End>{{1, pair[0], "b", key_of(0, 1), key_of(1, 0)}});
    close(pair[0]);
    MachinesControl control(0, pages, NearParts(), kLayout, memory, nullptr, mesh, std::make_unique<CpuMemory>());
    const auto send = [&](u64 number, const Abort& abort, const TagKey& key) {
        const Frame frame{sizeof(abort), kAbort, number};
        const Tag tag = tag_of(key, frame, &abort);
        std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
        bytes.append(reinterpret_cast<const char*>(&abort), sizeof(abort));
        bytes.append(reinterpret_cast<const char*>(&tag), sizeof(tag));
        expect(write(pair[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "not sent");
    };
    const u64 first = wire::abort_word(2, wire::kTimeout, 1, 0), second = wire::abort_word(2, wire::kDied, 1, 0);
    send(0, {2, first}, key_of(1, 0));
    expect(within([&] { return control.failure(2) == first; }), "a message does not arrive");
    if (repeated) control.stop_own(second, 2);
    send(repeated ? 0 : 1, {2, repeated ? first : second}, key_of(repeated ? 1 : 0, repeated ? 0 : 1));
    expect(within([&] { return mesh->state(1) == Mesh::State::kEnded; }),
           "a connection with a forged frame stays open");
    expect(control.failure(2) == (repeated ? second : first), "a forged frame counts");
    close(pair[1]);
}

}  // namespace

void run(uint64_t seed) {
    std::mt19937_64 random(seed);
    {
        World world;
        failures(world, random);
        recoveries(world, random);
        states(world);
    }
    {
        World world;
        announcements(world);
    }
    for (int i = 0; i < kMeshes; ++i) {
        World world;
        leaves(world, static_cast<Leaving>(i % 3));
    }
    forgeries(false);
    forgeries(true);
}

}  // namespace protocol::machines
