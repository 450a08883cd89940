// The implementations of the opcodes.
#pragma once

#include <string_view>

#include "sim/ptx/module.h"

namespace deep_ep::ptx {

// Sets the fields of an instruction that follow from its opcode: handler, vector and space. False: unknown opcode.
bool understand(std::string_view opcode, Instruction& instruction);

// One per family; null, or false, if the opcode belongs to another.
Handler find_arithmetic(std::string_view opcode);
Handler find_conversion(std::string_view opcode);
Handler find_control(std::string_view opcode);
Handler find_bulk(std::string_view opcode);
bool find_memory(std::string_view opcode, Instruction& instruction);
bool find_collective(std::string_view opcode, Instruction& instruction);

}  // namespace deep_ep::ptx
