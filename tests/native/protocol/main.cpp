// protocol SCENARIO SEED: runs a part of the protocol without Python. Exit code 0: all is well; 3: wrong values; 4: a
// rule of the SIMT machine or of the NIC was broken; 5: deadlock; 66: ThreadSanitizer's report.
#include <map>

#include "fields.h"
#include "posters.h"

int main(int argc, char** argv) {
    using namespace protocol;
    deep_ep::nic::Options slow;
    slow.blocks = 16;
    slow.mtu = 32;
    slow.most_bytes = 48;
    slow.most_delay = 4;
    slow.relaxed = true;
    deep_ep::nic::Options fast;
    fast.blocks = 64;
    const std::map<std::string, std::function<void(uint64_t)>> scenarios = {
        {"fields", fields::run},
        {"posters", [&](uint64_t seed) { posters::run(seed, {2, 4, 6}, slow); }},
        // 1.5 * 2^16 blocks: the index of the queue pair wraps.
        {"wrap", [&](uint64_t seed) { posters::run(seed, {2, 4, 4096}, fast); }},
    };
    if (argc != 3 || scenarios.count(argv[1]) == 0) return std::fprintf(stderr, "protocol SCENARIO SEED\n"), 2;
    try {
        scenarios.at(argv[1])(std::strtoull(argv[2], nullptr, 10));
    } catch (const planted::WrongValue& wrong) {
        return std::fprintf(stderr, "wrong value: %s\n", wrong.message.c_str()), 3;
    } catch (const deep_ep::cpu::SimtError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 4;
    } catch (const deep_ep::cpu::DeadlockError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 5;
    }
    return 0;
}
