// The tokens of PTX text: words, numbers and signs, each with its line.
#pragma once

#include <string>
#include <string_view>

#include "sim/ptx/error.h"

namespace deep_ep::ptx {

enum class TokenKind : u8 {
    kWord,    // a name, an opcode with its modifiers, a directive, a register
    kNumber,  // as written: 12, 0x1f, 0f3f800000
    kText,    // a string, without its quotes
    kSign,    // one character
    kEnd,
};

struct Token {
    TokenKind kind;
    std::string_view text;
    u32 line;

    bool is(char sign) const { return kind == TokenKind::kSign && text[0] == sign; }
    bool is(std::string_view word) const { return kind == TokenKind::kWord && text == word; }
};

// Splits text into tokens, one at a time. The text must outlive them.
class Tokens {
  public:
    explicit Tokens(std::string_view text);

    const Token& peek() const { return next_; }
    Token take();
    // Takes the next token if it is this one.
    bool skip(char sign);
    bool skip(std::string_view word);
    // Take the next token, which must be of this kind; otherwise throw PtxError.
    void expect(char sign);
    std::string_view word();
    i64 integer();  // with an optional sign
    // Skips from the next token, an opening brace, through its closing brace.
    void skip_braces();

    [[noreturn]] void fail(const std::string& why) const;

  private:
    Token read();

    std::string_view text_;
    size_t at_ = 0;
    u32 line_ = 1;
    Token next_{};
};

// The bits of a number token; those of a 32- or 64-bit float literal too. Throws PtxError.
u64 number_of(const Token& token);

}  // namespace deep_ep::ptx
