// A parsed PTX module: variables, functions, and instructions with resolved operands.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sim/ptx/error.h"

namespace deep_ep::ptx {

// The line of CUDA C++ that an instruction comes from: the innermost one, and the place where that was inlined, as an
// index into Module::places. 0: unknown.
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
    kVariable,   // `index`: into Module::variables; `value` is added to its address
    kLocal,      // `value`: an offset in the function's part of local memory
    kParam,      // `value`: an offset in the function's parameters
    kAddress,    // `index`: the slot that holds an address; `value` is added to it
    kLabel,      // `index`: the instruction to jump to
    kFunction,   // `index`: into Module::functions
    kNothing,    // _
};

enum class SpecialRegister : u8 { kThread, kThreads, kBlock, kBlockY, kBlocks, kLane, kGlobalTimer };

struct Operand {
    OperandKind kind;
    bool negated;  // for a predicate
    u32 index;
    i64 value;
};

// The scope of a strong access; kNone: a weak access.
enum class Scope : u8 { kNone, kBlock, kDevice, kSystem };

// The threads that must all reach an instruction before any continues: those of a warp, or of a block.
enum class Meets : u8 { kNone, kWarp, kBlock };

class Lane;
struct Instruction;
using Handler = void (*)(Lane& lane, const Instruction& instruction);

struct Instruction {
    Handler handler;
    const Operand* operands;
    u16 count;    // number of operands
    u8 vector;    // elements that a load or store moves; 1 for other instructions
    Space space;  // state space of the address
    Scope scope;  // of a strong access
    Meets meets;
    u32 number;     // among all instructions of the module
    u32 opcode;     // index into Module::opcodes
    u32 line;       // line of the PTX
    u32 place;      // index into Module::places
    Operand guard;  // predicate; kNothing: unconditional
};

struct Variable {
    std::string name;
    Space space;
    u32 alignment;
    u64 bytes;  // 0: dynamic shared memory, whose size the launch sets
    std::string initial;
    // An offset in `initial` that receives the address of another variable.
    struct Reference {
        u64 offset;
        u32 variable;
    };
    std::vector<Reference> references;
};

// A parameter or result of a function, or a parameter that it passes to a callee, in the function's frame.
struct Parameter {
    u64 offset;
    u64 bytes;
};

struct Function {
    std::string name;
    bool is_defined = false;
    std::vector<Parameter> parameters;
    std::vector<Parameter> results;
    u64 parameter_bytes = 0;  // size of all parameters in its frame
    u64 local_bytes = 0;
    u32 slots = 0;
    std::vector<Instruction> code;
    std::vector<Operand> operands;
};

struct Module {
    std::string target;  // sm_90a
    std::vector<Variable> variables;
    std::vector<Function> functions;
    std::vector<std::string> files;    // by number, starting at 1
    std::vector<Place> places{{}};     // [0] is the unknown place
    std::vector<std::string> opcodes;  // as written in the PTX

    std::unordered_map<std::string, u32> function_numbers, variable_numbers;

    const Function& function(const std::string& name) const;
    // "dispatch.h:120 < combine.h:35": a place, and where it was inlined.
    std::string describe(u32 place) const;
};

// Throws PtxError, with the line, if the text has something that this interpreter does not support.
Module parse(std::string_view text);

}  // namespace deep_ep::ptx
