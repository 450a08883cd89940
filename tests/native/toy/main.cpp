// toy SEED: normal mode over a fabric that the library does not know, added by a registry header of its own. Its kernel
// part is fabric/toy.h, its host part is here. Exit code 0: success.
#include <cstdio>
#include <cstdlib>

#include "../protocol/normal_mode.h"
#include "fabric/registry.h"
#include "host/network/network.h"

namespace {

using namespace deep_ep;

u64 all_puts = 0;

class ToyNetwork final : public host::Network {
  public:
    explicit ToyNetwork(const host::NetworkPlace& place) : heaps_(place.heaps) { toy_.heaps = heaps_.data(); }
    ~ToyNetwork() override { all_puts += toy_.puts; }

    void* state() override { return &toy_; }

  private:
    const std::vector<uint8_t*> heaps_;
    fabric::Toy toy_{};
};

const host::MakeNetwork registered =
    host::make_network<fabric::Toy> = [](const host::NetworkPlace& place) -> std::unique_ptr<host::Network> {
    return std::make_unique<ToyNetwork>(place);
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return std::fprintf(stderr, "toy SEED\n"), 2;
    try {
        for (const bool arena : {false, true}) {
            protocol::normal_mode::run(std::strtoull(argv[1], nullptr, 10), {"toy", arena, 1 << 14, 2, {}}, false);
        }
    } catch (const planted::WrongValue& wrong) {
        return std::fprintf(stderr, "wrong value: %s\n", wrong.message.c_str()), 3;
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 4;
    }
    std::printf("%llu puts\n", all_puts);
    return 0;
}
