// A module of PTX, read: variables, functions, and instructions whose operands are resolved.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ptx/error.h"

namespace deep_ep::ptx {

// A line of CUDA C++ that an instruction comes from: the innermost one, and where that was inlined, by its number in
// Module::places. 0: not known.
struct Place {
    u32 file;
    u32 line;
    u32 inlined_at;
};

enum class Space : u8 { kGeneric, kGlobal, kConst, kShared, kLocal, kParam };

enum class OperandKind : u8 {
    kRegister,   // `index`: its slot
    kImmediate,  // `value`: its bits
    kSpecial,    // `index`: a SpecialRegister
    kVariable,   // `index`: of Module::variables; `value` is added to its address
    kLocal,      // `value`: an offset in the function's part of local memory
    kParam,      // `value`: an offset in the function's parameters
    kAddress,    // `index`: the slot that holds an address; `value` is added to it
    kLabel,      // `index`: the instruction
    kFunction,   // `index`: of Module::functions
    kNothing,    // _
};

enum class SpecialRegister : u8 { kThread, kThreads, kBlock, kBlockY, kBlocks, kLane, kGlobalTimer };

struct Operand {
    OperandKind kind;
    bool negated;  // of a predicate
    u32 index;
    i64 value;
};

// Of strong accesses, by what their scope takes in; kNone: a weak access.
enum class Scope : u8 { kNone, kBlock, kDevice, kSystem };

// The threads that meet at an instruction before any goes on: those of a warp, or of a block.
enum class Meets : u8 { kNone, kWarp, kBlock };

class Lane;
struct Instruction;
using Handler = void (*)(Lane& lane, const Instruction& instruction);

struct Instruction {
    Handler handler;
    const Operand* operands;
    u16 count;    // of operands
    u8 vector;    // elements that a load or store moves, else 1
    Space space;  // that an address is in
    Scope scope;  // of a strong access
    Meets meets;
    u32 number;     // among all of the module's
    u32 opcode;     // in Module::opcodes
    u32 line;       // of the PTX
    u32 place;      // in Module::places
    Operand guard;  // kNothing: it always runs
};

struct Variable {
    std::string name;
    Space space;
    u32 alignment;
    u64 bytes;  // 0: the launch says, of dynamic shared memory
    std::string initial;
    // Where in `initial` the address of a variable goes.
    struct Reference {
        u64 offset;
        u32 variable;
    };
    std::vector<Reference> references;
};

// Of a function's parameters and results, and of those that it passes on, in its frame.
struct Parameter {
    u64 offset;
    u64 bytes;
};

struct Function {
    std::string name;
    bool is_defined = false;
    std::vector<Parameter> parameters;
    std::vector<Parameter> results;
    u64 parameter_bytes = 0;  // of all parameters in its frame
    u64 local_bytes = 0;
    u32 slots = 0;
    std::vector<Instruction> code;
    std::vector<Operand> operands;
};

struct Module {
    std::string target;  // sm_90a
    std::vector<Variable> variables;
    std::vector<Function> functions;
    std::vector<std::string> files;    // by number, from 1 on
    std::vector<Place> places{{}};     // [0] is not known
    std::vector<std::string> opcodes;  // each as it is written

    std::unordered_map<std::string, u32> function_numbers, variable_numbers;

    const Function& function(const std::string& name) const;
    // "dispatch.h:120 < combine.h:35": where a place is, and where it was inlined.
    std::string describe(u32 place) const;
};

// Throws PtxError, with the line, where the text has what this interpreter does not know.
Module parse(std::string_view text);

}  // namespace deep_ep::ptx
