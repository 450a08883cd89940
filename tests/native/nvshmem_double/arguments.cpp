#include "arguments.h"

#include <sys/random.h>
#include <cstdio>
#include <cstring>

#include "settings.h"

namespace nvshmem_double {
namespace {

constexpr unsigned kWithUniqueId = 1u << 3;

// The version word of a struct's first version, as its initializer writes it, which includes its size.
uint32_t version_word(const Golden& layout, const char* table) {
    return 1u << 16 | static_cast<uint32_t>(layout.number(table));
}

template <class T>
T read(const Golden& layout, const void* table, const std::string& field) {
    T value;
    std::memcpy(&value, static_cast<const char*>(table) + layout.offset(field), sizeof(value));
    return value;
}
template <class T>
void write(const Golden& layout, void* table, const std::string& field, T value) {
    std::memcpy(static_cast<char*>(table) + layout.offset(field), &value, sizeof(value));
}

void expect_word(uint32_t is, uint32_t expected, const std::string& name) {
    if (is == expected) return;
    throw Failure(kInvalidValue, name + " is " + std::to_string(is >> 16) + "<<16|" + std::to_string(is & 0xffff) +
                                     ", expected 1<<16|" + std::to_string(expected & 0xffff));
}

}  // namespace

Golden golden() { return Golden(layout_file()); }

void make_unique_id(const Golden& layout, void* id) {
    uint64_t random[2] = {};
    if (getrandom(random, sizeof(random), 0) != sizeof(random)) throw Failure(kInternal, "no random numbers");
    std::memset(id, 0, layout.number("UniqueId"));
    write(layout, id, "UniqueId.version", version_word(layout, "UniqueId"));
    std::snprintf(static_cast<char*>(id) + sizeof(uint32_t), 40, "job_%016llx%016llx",
                  static_cast<unsigned long long>(random[0]), static_cast<unsigned long long>(random[1]));
}

void set_arguments(const Golden& layout, void* arguments, int pe, int pes, const void* id) {
    write(layout, arguments, "InitArguments.unique_id", id);
    write(layout, arguments, "InitArguments.pe", pe);
    write(layout, arguments, "InitArguments.pes", pes);
}

Arguments read_arguments(const Golden& layout, unsigned flags, const void* arguments) {
    if ((flags & kWithUniqueId) == 0) {
        throw Failure(kNotSupported, "flags " + std::to_string(flags) + " without that of a unique id");
    }
    if (arguments == nullptr) throw Failure(kInvalidValue, "no arguments");
    if (strict()) {
        const auto word = [&](const char* field) { return read<uint32_t>(layout, arguments, field); };
        const uint32_t whole = version_word(layout, "InitArguments");
        const auto offset = static_cast<uint32_t>(layout.offset("InitArguments.arguments_version"));
        expect_word(word("InitArguments.version"), whole, "the arguments' version");
        expect_word(word("InitArguments.arguments_version"), whole - offset, "the version of their inner part");
        expect_word(word("InitArguments.unique_id_version"), version_word(layout, "UniqueIdArguments"),
                    "the version of their part for the unique id");
    }
    const auto* const id = read<const char*>(layout, arguments, "InitArguments.unique_id");
    if (id == nullptr) throw Failure(kInvalidValue, "no unique id: call nvshmemx_set_attr_uniqueid_args first");
    expect_word(read<uint32_t>(layout, id, "UniqueId.version"), version_word(layout, "UniqueId"),
                "the unique id's version");
    const size_t bytes = layout.number("UniqueId") - sizeof(uint32_t);
    Arguments read_of{std::string(id + sizeof(uint32_t), strnlen(id + sizeof(uint32_t), bytes)),
                      read<int>(layout, arguments, "InitArguments.pe"),
                      read<int>(layout, arguments, "InitArguments.pes")};
    if (read_of.id.rfind("job_", 0) != 0) throw Failure(kInvalidValue, "not a unique id of nvshmemx_get_uniqueid");
    if (read_of.pes < 1 || read_of.pe < 0 || read_of.pe >= read_of.pes) {
        throw Failure(kInvalidValue,
                      "PE " + std::to_string(read_of.pe) + " of " + std::to_string(read_of.pes) + " PEs");
    }
    return read_of;
}

}  // namespace nvshmem_double
