// planted SCENARIO BUG SEED: runs a small kernel with one bug, or with "none". Exit code 0: nothing was detected; 3:
// wrong values; 4: a rule of the SIMT machine was broken; 5: deadlock; 66: report by ThreadSanitizer.
#include <map>

#include "block.h"
#include "copy_engine.h"
#include "host.h"
#include "misuse.h"
#include "ring.h"

int main(int argc, char** argv) {
    using namespace planted;
    const std::map<std::string, void (*)(uint64_t)> scenarios = {
        {"ring", ring::run}, {"block", block::run},   {"copy engine", copy_engine::run},
        {"host", host::run}, {"misuse", misuse::run},
    };
    if (argc != 4 || scenarios.count(argv[1]) == 0) return std::fprintf(stderr, "planted SCENARIO BUG SEED\n"), 2;
    chosen_bug = argv[2];
    const auto run = scenarios.at(argv[1]);
    try {
        run(std::strtoull(argv[3], nullptr, 10));
    } catch (const WrongValue& wrong) {
        return std::fprintf(stderr, "wrong value: %s\n", wrong.message.c_str()), 3;
    } catch (const cpu::SimtError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 4;
    } catch (const cpu::DeadlockError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 5;
    }
    return 0;
}
