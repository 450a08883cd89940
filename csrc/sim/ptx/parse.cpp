#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_set>

#include "sim/ptx/handlers.h"
#include "sim/ptx/scopes.h"
#include "sim/ptx/tokens.h"

namespace deep_ep::ptx {
namespace {

const std::unordered_map<std::string_view, u64> kTypeBytes{
    {".b8", 1},  {".u8", 1},  {".s8", 1},  {".b16", 2}, {".u16", 2}, {".s16", 2}, {".b32", 4},
    {".u32", 4}, {".s32", 4}, {".f32", 4}, {".b64", 8}, {".u64", 8}, {".s64", 8}, {".f64", 8},
};

const std::unordered_map<std::string_view, SpecialRegister> kSpecial{
    {"%tid.x", SpecialRegister::kThread},
    {"%ntid.x", SpecialRegister::kThreads},
    {"%ctaid.x", SpecialRegister::kBlock},
    {"%ctaid.y", SpecialRegister::kBlockY},
    {"%nctaid.x", SpecialRegister::kBlocks},
    {"%laneid", SpecialRegister::kLane},
    {"%globaltimer", SpecialRegister::kGlobalTimer},
};

class Parser {
  public:
    explicit Parser(std::string_view text) : tokens_(text) {}

    Module run() {
        while (tokens_.peek().kind != TokenKind::kEnd) top_level();
        for (const Function& function : module_.functions) {
            if (!function.is_defined && called_.count(function.name) != 0) {
                throw PtxError(function.name + " is called but not defined");
            }
        }
        return std::move(module_);
    }

  private:
    // --- the module ----------------------------------------------------------------------------------

    void top_level() {
        const std::string_view word = tokens_.word();
        if (word == ".version") {
            tokens_.take();  // 9.5: a number, then a word that begins with a dot
            tokens_.take();
        } else if (word == ".target") {
            module_.target = tokens_.word();
            while (tokens_.skip(',')) tokens_.word();
        } else if (word == ".address_size") {
            if (tokens_.integer() != 64) tokens_.fail("address_size: expected 64");
        } else if (word == ".file") {
            file();
        } else if (word == ".section") {
            tokens_.word();
            tokens_.skip_braces();
        } else if (word == ".weak" || word == ".visible" || word == ".extern") {
            // Linkage does not matter: there is no other module.
        } else if (word == ".global" || word == ".const" || word == ".shared") {
            variable(word == ".global" ? Space::kGlobal : word == ".const" ? Space::kConst : Space::kShared);
        } else if (word == ".func" || word == ".entry") {
            function();
        } else {
            tokens_.fail(std::string(word) + " is not supported");
        }
    }

    void file() {
        const auto number = static_cast<size_t>(tokens_.integer());
        const Token name = tokens_.take();
        if (name.kind != TokenKind::kText) tokens_.fail("expected the name of a file");
        if (module_.files.size() <= number) module_.files.resize(number + 1);
        module_.files[number] = name.text;
        while (tokens_.skip(',')) tokens_.integer();  // date and size
    }

    void variable(Space space) {
        Variable made{};
        made.space = space;
        made.alignment = 1;
        if (tokens_.skip(".align")) made.alignment = static_cast<u32>(tokens_.integer());
        const u64 element = type_bytes();
        made.alignment = std::max(made.alignment, static_cast<u32>(element));
        made.name = tokens_.word();
        made.bytes = element;
        if (tokens_.skip('[')) {
            made.bytes = tokens_.peek().is(']') ? 0 : element * static_cast<u64>(tokens_.integer());
            tokens_.expect(']');
        }
        if (tokens_.skip('=')) {
            if (tokens_.skip('{')) {
                do {
                    initialise(made, element);
                } while (tokens_.skip(','));
                tokens_.expect('}');
            } else {
                initialise(made, element);
            }
        }
        made.initial.resize(made.bytes, '\0');
        tokens_.expect(';');
        module_.variable_numbers[made.name] = static_cast<u32>(module_.variables.size());
        module_.variables.push_back(std::move(made));
    }

    void initialise(Variable& variable, u64 element) {
        if (tokens_.skip("generic")) {
            tokens_.expect('(');
            variable.references.push_back({variable.initial.size(), variable_number(tokens_.word())});
            tokens_.expect(')');
            variable.initial.resize(variable.initial.size() + 8, '\0');
            return;
        }
        const i64 value = tokens_.integer();
        variable.initial.append(reinterpret_cast<const char*>(&value), element);
    }

    u32 variable_number(std::string_view name) const {
        const auto found = module_.variable_numbers.find(std::string(name));
        if (found == module_.variable_numbers.end()) tokens_.fail("no variable is named " + std::string(name));
        return found->second;
    }

    u64 type_bytes() {
        const auto found = kTypeBytes.find(tokens_.peek().text);
        if (found == kTypeBytes.end()) tokens_.fail("expected a type");
        tokens_.take();
        return found->second;
    }

    // --- functions -----------------------------------------------------------------------------------

    void function() {
        scopes_ = Scopes();
        scopes_.open();
        Function made;
        if (tokens_.skip('(')) {
            made.results = formal_parameters(made);
        }
        made.name = tokens_.word();
        if (tokens_.skip('(')) made.parameters = formal_parameters(made);
        while (!tokens_.peek().is('{') && !tokens_.peek().is(';')) tokens_.take();  // .maxntid and similar
        const auto [place, is_new] = module_.function_numbers.try_emplace(made.name, module_.functions.size());
        if (is_new) module_.functions.emplace_back();
        if (tokens_.skip(';')) {
            if (is_new) module_.functions[place->second] = std::move(made);
            return;
        }
        made.is_defined = true;
        body(made);
        module_.functions[place->second] = std::move(made);
    }

    std::vector<Parameter> formal_parameters(Function& made) {
        std::vector<Parameter> found;
        while (!tokens_.skip(')')) {
            if (!tokens_.skip(".param")) tokens_.fail("expected .param");
            found.push_back(parameter(made));
            tokens_.skip(',');
        }
        return found;
    }

    // What follows ".param". Returns its place in the function's frame.
    Parameter parameter(Function& made) {
        u64 alignment = 1;
        if (tokens_.skip(".align")) alignment = static_cast<u64>(tokens_.integer());
        const u64 element = type_bytes();
        if (tokens_.skip(".ptr")) {  // attributes of what it points to
            while (tokens_.skip(".global") || tokens_.skip(".shared") || tokens_.skip(".local")) continue;
            if (tokens_.skip(".align")) tokens_.integer();
        }
        const std::string_view name = tokens_.word();
        u64 bytes = element;
        if (tokens_.skip('[')) {
            bytes *= static_cast<u64>(tokens_.integer());
            tokens_.expect(']');
        }
        const Parameter found{align(made.parameter_bytes, std::max(alignment, element)), bytes};
        made.parameter_bytes = found.offset + bytes;
        scopes_.name(name, {OperandKind::kParam, false, 0, static_cast<i64>(found.offset)});
        return found;
    }

    static u64 align(u64 offset, u64 alignment) { return (offset + alignment - 1) / alignment * alignment; }

    void body(Function& made) {
        labels_.clear();
        jumps_.clear();
        firsts_.clear();
        place_ = 0;
        tokens_.expect('{');
        for (u32 depth = 1; depth != 0;) {
            if (tokens_.skip('{')) {
                ++depth;
                scopes_.open();
            } else if (tokens_.skip('}')) {
                --depth;
                scopes_.close();
            } else if (tokens_.peek().kind == TokenKind::kEnd) {
                tokens_.fail("expected '}'");
            } else if (tokens_.peek().text[0] == '.') {
                directive(made);
            } else {
                statement(made);
            }
        }
        made.slots = scopes_.slots();
        resolve(made);
    }

    void directive(Function& made) {
        const std::string_view word = tokens_.word();
        if (word == ".reg") {
            registers();
        } else if (word == ".local") {
            const auto [name, at] = local_array(made);
            scopes_.name(name, {OperandKind::kLocal, false, 0, static_cast<i64>(at)});
        } else if (word == ".shared") {
            variable(Space::kShared);
        } else if (word == ".param") {
            parameter(made);
            tokens_.expect(';');
        } else if (word == ".loc") {
            location();
        } else if (word == ".pragma") {
            tokens_.take();
            tokens_.expect(';');
        } else {
            tokens_.fail(std::string(word) + " is not supported in a function");
        }
    }

    void registers() {
        tokens_.word();  // the type is not needed: opcodes say how they use a register
        do {
            const std::string_view name = tokens_.word();
            if (tokens_.skip('<')) {
                scopes_.range(name, static_cast<u32>(tokens_.integer()));
                tokens_.expect('>');
            } else {
                scopes_.single(name);
            }
        } while (tokens_.skip(','));
        tokens_.expect(';');
    }

    std::pair<std::string_view, u64> local_array(Function& made) {
        u64 alignment = 1;
        if (tokens_.skip(".align")) alignment = static_cast<u64>(tokens_.integer());
        const u64 element = type_bytes();
        const std::string_view name = tokens_.word();
        tokens_.expect('[');
        const u64 at = align(made.local_bytes, std::max(alignment, element));
        made.local_bytes = at + element * static_cast<u64>(tokens_.integer());
        tokens_.expect(']');
        tokens_.expect(';');
        return {name, at};
    }

    // What follows ".loc". An inlined place names the line at which it was inlined, which already has a place.
    void location() {
        const auto triple = [&] {
            const auto file = static_cast<u32>(tokens_.integer()), line = static_cast<u32>(tokens_.integer());
            return std::tuple(file, line, static_cast<u32>(tokens_.integer()));
        };
        const auto here = triple();
        u32 outer = 0;
        while (tokens_.skip(',')) {
            if (tokens_.skip("function_name")) {
                tokens_.word();
                if (tokens_.skip('+')) tokens_.integer();
            } else if (tokens_.skip("inlined_at")) {
                const auto there = triple();
                const auto found = latest_.find(there);
                outer = found != latest_.end() ? found->second : place_of(there, 0);
            } else {
                tokens_.fail("expected function_name or inlined_at");
            }
        }
        place_ = place_of(here, outer);
        latest_[here] = place_;
    }

    u32 place_of(const std::tuple<u32, u32, u32>& here, u32 outer) {
        const auto [found, is_new] =
            places_.try_emplace(std::pair(here, outer), static_cast<u32>(module_.places.size()));
        if (is_new) module_.places.push_back({std::get<0>(here), std::get<1>(here), outer});
        return found->second;
    }

    // --- instructions --------------------------------------------------------------------------------

    void statement(Function& made) {
        Instruction instruction{};
        instruction.line = tokens_.peek().line;
        instruction.place = place_;
        instruction.vector = 1;
        instruction.guard.kind = OperandKind::kNothing;
        if (tokens_.skip('@')) {
            const bool negated = tokens_.skip('!');
            instruction.guard = operand();
            instruction.guard.negated = negated;
        }
        const std::string_view word = tokens_.word();
        if (tokens_.skip(':')) {
            labels_[std::string(word)] = static_cast<u32>(made.code.size());
            return;
        }
        instruction.number = instructions_++;
        instruction.opcode = opcode(word);
        if (!understand(word, instruction)) {
            throw PtxError("line " + std::to_string(instruction.line) + ": " + std::string(word) + " is not supported");
        }
        const size_t first = made.operands.size();
        if (word.starts_with("call")) {
            call(made);
        } else {
            while (!tokens_.peek().is(';')) {
                const bool is_first = made.operands.size() == first, is_group = tokens_.peek().is('{');
                operands(made);
                if (is_first && is_group) instruction.vector = static_cast<u8>(made.operands.size() - first);
                if (!tokens_.skip(',') && !tokens_.peek().is(';')) tokens_.fail("expected ',' or ';'");
            }
        }
        tokens_.expect(';');
        instruction.count = static_cast<u16>(made.operands.size() - first);
        firsts_.push_back(first);
        made.code.push_back(instruction);
    }

    u32 opcode(std::string_view word) {
        const auto [found, is_new] = opcodes_.try_emplace(std::string(word), static_cast<u32>(module_.opcodes.size()));
        if (is_new) module_.opcodes.emplace_back(word);
        return found->second;
    }

    // One element of the operand list: {a, b} and a|b are several operands.
    void operands(Function& made) {
        if (tokens_.skip('{')) {
            do {
                made.operands.push_back(operand());
            } while (tokens_.skip(','));
            tokens_.expect('}');
        } else if (tokens_.skip('[')) {
            made.operands.push_back(address());
            tokens_.expect(']');
        } else {
            made.operands.push_back(operand());
            if (tokens_.skip('|')) made.operands.push_back(operand());
        }
    }

    Operand operand() {
        const bool negated = tokens_.skip('!');
        const Token& next = tokens_.peek();
        if (next.kind == TokenKind::kNumber || next.is('-')) {
            return {OperandKind::kImmediate, false, 0, tokens_.integer()};
        }
        const std::string_view name = tokens_.word();
        if (name == "_") return {OperandKind::kNothing, false, 0, 0};
        Operand found = named(name);
        found.negated = negated;
        return found;
    }

    Operand named(std::string_view name) {
        if (const Operand* known = scopes_.find(name)) return *known;
        if (const auto special = kSpecial.find(name); special != kSpecial.end()) {
            return {OperandKind::kSpecial, false, static_cast<u32>(special->second), 0};
        }
        if (const auto found = module_.variable_numbers.find(std::string(name));
            found != module_.variable_numbers.end()) {
            return {OperandKind::kVariable, false, found->second, 0};
        }
        if (!name.starts_with("$")) tokens_.fail(std::string(name) + " is not declared, before this");
        jumps_.emplace_back(name);
        return {OperandKind::kLabel, false, static_cast<u32>(jumps_.size() - 1), 0};
    }

    Operand address() {
        Operand base = operand();
        if (tokens_.skip('+')) base.value += tokens_.integer();
        if (base.kind == OperandKind::kRegister) base.kind = OperandKind::kAddress;
        return base;
    }

    // "(results), function, (parameters)": the function, its results and its parameters.
    void call(Function& made) {
        std::vector<Operand> results, given;
        if (tokens_.skip('(')) results = passed();
        tokens_.skip(',');
        const std::string name(tokens_.word());
        const auto found = module_.function_numbers.find(name);
        if (found == module_.function_numbers.end()) tokens_.fail("no function is named " + name);
        called_.insert(name);
        if (tokens_.skip(',')) {
            tokens_.expect('(');
            given = passed();
        }
        made.operands.push_back({OperandKind::kFunction, false, found->second, static_cast<i64>(results.size())});
        made.operands.insert(made.operands.end(), results.begin(), results.end());
        made.operands.insert(made.operands.end(), given.begin(), given.end());
    }

    std::vector<Operand> passed() {
        std::vector<Operand> found;
        while (!tokens_.skip(')')) {
            found.push_back(operand());
            tokens_.skip(',');
        }
        return found;
    }

    void resolve(Function& made) {
        for (Operand& operand : made.operands) {
            if (operand.kind != OperandKind::kLabel) continue;
            const auto found = labels_.find(jumps_[operand.index]);
            if (found == labels_.end()) throw PtxError(made.name + ": no label is named " + jumps_[operand.index]);
            operand.index = found->second;
        }
        for (size_t i = 0; i < made.code.size(); ++i) made.code[i].operands = made.operands.data() + firsts_[i];
    }

    Tokens tokens_;
    Module module_;
    Scopes scopes_;
    u32 place_ = 0, instructions_ = 0;
    std::map<std::tuple<u32, u32, u32>, u32> latest_;  // the last place of a file, line and column
    std::map<std::pair<std::tuple<u32, u32, u32>, u32>, u32> places_;
    std::unordered_map<std::string, u32> opcodes_;
    std::unordered_set<std::string> called_;
    // State of the function that is being parsed.
    std::unordered_map<std::string, u32> labels_;
    std::vector<std::string> jumps_;
    std::vector<size_t> firsts_;  // index of each instruction's first operand
};

}  // namespace

Module parse(std::string_view text) { return Parser(text).run(); }

const Function& Module::function(const std::string& name) const {
    const auto found = function_numbers.find(name);
    if (found == function_numbers.end()) throw PtxError("the module has no function " + name);
    return functions[found->second];
}

std::string Module::describe(u32 place) const {
    std::string text;
    for (; place != 0; place = places[place].inlined_at) {
        const Place& here = places[place];
        const std::string& path = here.file < files.size() ? files[here.file] : std::string();
        text += (text.empty() ? "" : " < ") + path.substr(path.rfind('/') + 1) + ":" + std::to_string(here.line);
    }
    return text.empty() ? "?" : text;
}

}  // namespace deep_ep::ptx
