#include "sim/ptx/tokens.h"

#include <cctype>
#include <charconv>

namespace deep_ep::ptx {
namespace {

bool is_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%'; }

}  // namespace

Tokens::Tokens(std::string_view text) : text_(text) { next_ = read(); }

Token Tokens::take() {
    const Token taken = next_;
    if (taken.kind != TokenKind::kEnd) next_ = read();
    return taken;
}

bool Tokens::skip(char sign) {
    if (!next_.is(sign)) return false;
    take();
    return true;
}

bool Tokens::skip(std::string_view word) {
    if (!next_.is(word)) return false;
    take();
    return true;
}

void Tokens::expect(char sign) {
    if (!skip(sign)) fail(std::string("expected '") + sign + "'");
}

std::string_view Tokens::word() {
    if (next_.kind != TokenKind::kWord) fail("expected a name");
    return take().text;
}

i64 Tokens::integer() {
    const bool negative = skip('-');
    if (next_.kind != TokenKind::kNumber) fail("expected a number");
    const u64 value = number_of(take());
    return static_cast<i64>(negative ? u64{0} - value : value);
}

void Tokens::skip_braces() {
    expect('{');
    for (u32 depth = 1; depth != 0;) {
        const Token token = take();
        if (token.kind == TokenKind::kEnd) fail("expected '}'");
        depth += token.is('{') ? 1 : 0;
        depth -= token.is('}') ? 1 : 0;
    }
}

void Tokens::fail(const std::string& why) const {
    const std::string found = next_.kind == TokenKind::kEnd ? "the end" : "'" + std::string(next_.text) + "'";
    throw PtxError("line " + std::to_string(next_.line) + ": " + why + ", found " + found);
}

Token Tokens::read() {
    const auto more = [&](size_t ahead = 0) { return at_ + ahead < text_.size(); };
    while (more()) {
        if (text_[at_] == '\n') ++line_;
        if (std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
            ++at_;
        } else if (text_.substr(at_, 2) == "//") {
            while (more() && text_[at_] != '\n') ++at_;
        } else {
            break;
        }
    }
    if (!more() || text_[at_] == '\0') return {TokenKind::kEnd, {}, line_};
    const size_t begin = at_;
    if (text_[at_] == '"') {
        const size_t end = text_.find('"', begin + 1);
        if (end == std::string_view::npos) throw PtxError("line " + std::to_string(line_) + ": unterminated string");
        at_ = end + 1;
        return {TokenKind::kText, text_.substr(begin + 1, end - begin - 1), line_};
    }
    if (std::isdigit(static_cast<unsigned char>(text_[at_])) != 0) {
        while (more() && std::isalnum(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
        return {TokenKind::kNumber, text_.substr(begin, at_ - begin), line_};
    }
    if (is_of_word(text_[at_]) || text_[at_] == '.') {
        // A modifier may contain colons: shared::cta.
        while (more() && (is_of_word(text_[at_]) || text_[at_] == '.' || text_.substr(at_, 2) == "::")) {
            at_ += text_[at_] == ':' ? 2 : 1;
        }
        return {TokenKind::kWord, text_.substr(begin, at_ - begin), line_};
    }
    ++at_;
    return {TokenKind::kSign, text_.substr(begin, 1), line_};
}

u64 number_of(const Token& token) {
    const std::string_view text = token.text;
    const std::string_view prefix = text.size() > 2 ? text.substr(0, 2) : std::string_view();
    // 0f3f800000 and 0d...: the bits of a float.
    const bool is_hex =
        prefix == "0x" || prefix == "0X" || prefix == "0f" || prefix == "0F" || prefix == "0d" || prefix == "0D";
    std::string_view digits = is_hex ? text.substr(2) : text;
    if (digits.ends_with('U')) digits.remove_suffix(1);  // unsigned: the same bits
    u64 value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, is_hex ? 16 : 10);
    if (error != std::errc() || end != digits.data() + digits.size()) {
        throw PtxError("line " + std::to_string(token.line) + ": expected a number, found '" + std::string(text) + "'");
    }
    return value;
}

}  // namespace deep_ep::ptx
