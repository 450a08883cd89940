// SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and its
// reference code for 128 bits). Distinguishes frames of the other end from frames injected into the connection.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "wire/control.h"

namespace deep_ep::host {

static_assert(std::endian::native == std::endian::little, "frames and their tags are little-endian");

struct TagKey {
    u64 words[2];
};

class TagMaker {
  public:
    explicit TagMaker(const TagKey& key)
        : v0_(0x736f6d6570736575 ^ key.words[0]),
          v1_(0x646f72616e646f6d ^ key.words[1] ^ 0xee),
          v2_(0x6c7967656e657261 ^ key.words[0]),
          v3_(0x7465646279746573 ^ key.words[1]) {}

    void add(const void* data, size_t bytes) {
        const auto* const from = static_cast<const u8*>(data);
        for (size_t i = 0; i < bytes; ++i) {
            held_ |= static_cast<u64>(from[i]) << 8 * (bytes_ % 8);
            if (++bytes_ % 8 == 0) take_held();
        }
    }
    wire::control::Tag finish() {
        held_ |= bytes_ << 56;
        take_held();
        wire::control::Tag tag{};
        v2_ ^= 0xee;
        for (int i = 0; i < 4; ++i) round();
        tag.words[0] = v0_ ^ v1_ ^ v2_ ^ v3_;
        v1_ ^= 0xdd;
        for (int i = 0; i < 4; ++i) round();
        tag.words[1] = v0_ ^ v1_ ^ v2_ ^ v3_;
        return tag;
    }

  private:
    void take_held() {
        v3_ ^= held_;
        round();
        round();
        v0_ ^= held_;
        held_ = 0;
    }
    void round() {
        v0_ += v1_, v1_ = std::rotl(v1_, 13), v1_ ^= v0_, v0_ = std::rotl(v0_, 32);
        v2_ += v3_, v3_ = std::rotl(v3_, 16), v3_ ^= v2_;
        v0_ += v3_, v3_ = std::rotl(v3_, 21), v3_ ^= v0_;
        v2_ += v1_, v1_ = std::rotl(v1_, 17), v1_ ^= v2_, v2_ = std::rotl(v2_, 32);
    }

    u64 v0_, v1_, v2_, v3_;
    u64 held_ = 0;  // bytes that do not yet form a word
    u64 bytes_ = 0;
};

inline wire::control::Tag tag_of(const TagKey& key, const wire::control::Frame& frame, const void* payload) {
    TagMaker maker(key);
    maker.add(&frame, sizeof(frame));
    maker.add(payload, frame.bytes);
    return maker.finish();
}

}  // namespace deep_ep::host
