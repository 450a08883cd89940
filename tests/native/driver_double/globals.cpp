#include "globals.h"

#include <elf.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "double.h"

namespace driver_double {
namespace {

struct Global {
    std::vector<char> bytes;  // initial contents
    std::shared_ptr<char> memory;
};
std::map<const void*, std::map<std::string, Global>> globals;  // by module and name

constexpr size_t kAlignment = 256;
// No image here has more. In a damaged one a number is larger than this, or points out of its section.
constexpr uint64_t kMaxBytes = 1 << 30;

// The caller that loads a module does not pass the size of its image; the headers contain it. Therefore a number is
// trusted only if it is consistent with the others: an entry within its section, a name within its table, contents
// within the section that holds them.
class Image {
  public:
    explicit Image(const void* image) : bytes_(static_cast<const char*>(image)) {
        if (bytes_[EI_CLASS] != ELFCLASS64) return;  // the byte after "\x7fELF", which has been compared
        const auto header = read<Elf64_Ehdr>(0);
        if (header.e_shentsize != sizeof(Elf64_Shdr) || header.e_shoff == 0 || header.e_shoff > kMaxBytes) return;
        for (size_t i = 0; i < header.e_shnum; ++i) {
            sections_.push_back(read<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr)));
        }
    }

    std::map<std::string, Global> variables() const {
        std::map<std::string, Global> found;
        for (const Elf64_Shdr& table : sections_) {
            if (table.sh_type == SHT_SYMTAB) read_table(table, found);
        }
        return found;
    }

  private:
    template <class T>
    T read(uint64_t offset) const {
        T value;
        std::memcpy(&value, bytes_ + offset, sizeof(value));
        return value;
    }

    static bool sound(const Elf64_Shdr& section) {
        return section.sh_offset <= kMaxBytes && section.sh_size <= kMaxBytes;
    }

    void read_table(const Elf64_Shdr& table, std::map<std::string, Global>& found) const {
        if (!sound(table) || table.sh_entsize != sizeof(Elf64_Sym) || table.sh_link >= sections_.size()) return;
        const Elf64_Shdr& names = sections_[table.sh_link];
        if (!sound(names) || names.sh_type != SHT_STRTAB) return;
        for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table.sh_size; at += sizeof(Elf64_Sym)) {
            const auto symbol = read<Elf64_Sym>(table.sh_offset + at);
            if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_size == 0) continue;
            if (symbol.st_shndx == SHN_UNDEF || symbol.st_shndx >= sections_.size()) continue;
            const Elf64_Shdr& section = sections_[symbol.st_shndx];
            if (!sound(section) || symbol.st_value > section.sh_size) continue;
            if (symbol.st_size > section.sh_size - symbol.st_value) continue;
            if (symbol.st_name >= names.sh_size) continue;
            const char* const name = bytes_ + names.sh_offset + symbol.st_name;
            Global global{std::vector<char>(symbol.st_size), nullptr};
            if (section.sh_type != SHT_NOBITS) {
                std::memcpy(global.bytes.data(), bytes_ + section.sh_offset + symbol.st_value, symbol.st_size);
            }
            found[std::string(name, strnlen(name, names.sh_size - symbol.st_name))] = std::move(global);
        }
    }

    const char* const bytes_;
    std::vector<Elf64_Shdr> sections_;
};

}  // namespace

void remember_globals(Module module, const void* image) { globals[module] = Image(image).variables(); }
void forget_globals(Module module) { globals.erase(module); }

}  // namespace driver_double

using namespace driver_double;

#pragma GCC visibility push(default)
extern "C" {

Result cuModuleGetGlobal_v2(DevicePointer* address, size_t* bytes, Module module, const char* name) {
    BEGIN(enter_in_context("cuModuleGetGlobal"));
    if (!alive.count(module)) return kInvalidHandle;
    const auto found = globals[module].find(name);
    if (found == globals[module].end()) return kNotFound;
    Global& global = found->second;
    if (global.memory == nullptr) {
        const size_t all = (global.bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
        global.memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, all)), std::free);
        std::memcpy(global.memory.get(), global.bytes.data(), global.bytes.size());
    }
    if (address != nullptr) *address = reinterpret_cast<DevicePointer>(global.memory.get());
    if (bytes != nullptr) *bytes = global.bytes.size();
    return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
