// The constants that values are, where they have the type that is asked for. A constant may be None where a
// schema has an optional argument, and a value need be no constant: then there is none.
#pragma once

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tsfuser {

inline std::optional<int64_t> known_int(const torch::jit::Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isInt() ? std::make_optional(constant->toInt()) : std::nullopt;
}

inline std::optional<bool> known_bool(const torch::jit::Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isBool() ? std::make_optional(constant->toBool()) : std::nullopt;
}

inline std::optional<double> known_double(const torch::jit::Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isDouble() ? std::make_optional(constant->toDouble()) : std::nullopt;
}

inline std::optional<std::string> known_string(const torch::jit::Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isString() ? std::make_optional(constant->toStringRef()) : std::nullopt;
}

inline std::optional<std::vector<int64_t>> known_ints(const torch::jit::Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isIntList() ? std::make_optional(constant->toIntVector()) : std::nullopt;
}

}  // namespace tsfuser
