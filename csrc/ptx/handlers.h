// What each opcode does.
#pragma once

#include <string_view>

#include "ptx/module.h"

namespace deep_ep::ptx {

// Fills in what the opcode says of an instruction: handler, vector and space. False: it is not known.
bool understand(std::string_view opcode, Instruction& instruction);

// By family; null, or false, where the opcode is of another.
Handler find_arithmetic(std::string_view opcode);
Handler find_conversion(std::string_view opcode);
Handler find_control(std::string_view opcode);
Handler find_bulk(std::string_view opcode);
bool find_memory(std::string_view opcode, Instruction& instruction);
bool find_collective(std::string_view opcode, Instruction& instruction);

}  // namespace deep_ep::ptx
