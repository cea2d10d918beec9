// The facts that the rows of Python's op table have about kinds of nodes (tsfuser/ops/table.py). Python
// passes them once, at the import, and what options change in them when the first graph comes. C++ has no
// list of op names of its own.
#pragma once

#include <ATen/core/interned_strings.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tsfuser {

using Kinds = std::unordered_set<c10::Symbol>;
using ArgumentNames = std::unordered_map<c10::Symbol, std::string>;  // by kind

// How the sizes of an op's first result follow from those of its first operand: an operator that gets them,
// and then these arguments of the op.
struct SizeRule {
  c10::Symbol kind;
  std::vector<std::string> arguments;
  bool takes_lists;  // where the op takes one number, too
};
using SizeRules = std::unordered_map<c10::Symbol, SizeRule>;  // by kind

struct OpFacts {
  Kinds in_place;          // in-place ops that become functional before any dtype is known
  Kinds fresh;             // ops whose results share memory with no tensor that was there before
  Kinds computed;          // of these, ops that groups can take
  Kinds handed_on;         // ops of groups whose result may be their first operand, or a view or cast of it
  Kinds excluded;          // views that autodiff differentiates, but keeps out of its graphs
  Kinds heavy;             // matrix products and convolutions, which are left to torch's libraries
  Kinds same_sizes;        // ops whose first result has the sizes of their first operand
  Kinds moved;             // ops that move elements: the result has dtype and device of the first operand
  Kinds like_first;        // ops whose result has dtype and device of the first operand, whatever it is
  Kinds promoted;          // ops of two tensors whose result has what these promote to
  Kinds retyped;           // of the functional forms of `in_place`, those that may change the dtype
  Kinds sized;             // ops whose results' sizes follow from their operands' sizes, and from numbers
  Kinds ranked;            // ops whose first result has as many dims as those of their operands tell
  Kinds broadcast;         // ops whose result has the sizes of their operands, broadcast
  Kinds alone;             // ops that are worth a kernel of their own on a GPU, in bfloat16
  Kinds flat;              // ops that pass no gradient on to their operands
  Kinds hidden_views;      // ops that may give views of an operand, though no schema says so
  Kinds writers;           // ops that write to operands, as to statistics, though no schema says so
  ArgumentNames asked;     // of which argument an op reads no elements, but sizes, dtype and the like
  SizeRules size_rules;    // of ops that change the number of dims, their order, or how long they are
  size_t most_joined = 0;  // tensors that an op of groups joins into one, whatever they are
  size_t most_joined_in_memory = 0;  // the same of tensors that no op of the group computes
};

inline Kinds symbols(const std::vector<std::string>& names) {
  Kinds kinds;
  for (const std::string& name : names) {
    kinds.insert(c10::Symbol::fromQualString(name));
  }
  return kinds;
}

inline ArgumentNames argument_names(const std::unordered_map<std::string, std::string>& names) {
  ArgumentNames found;
  for (const auto& [kind, name] : names) {
    found.emplace(c10::Symbol::fromQualString(kind), name);
  }
  return found;
}

inline SizeRules size_rules(
    const std::unordered_map<std::string, std::tuple<std::string, std::vector<std::string>, bool>>& rules) {
  SizeRules found;
  for (const auto& [kind, rule] : rules) {
    const auto& [operation, arguments, takes_lists] = rule;
    found.emplace(c10::Symbol::fromQualString(kind),
                  SizeRule{c10::Symbol::fromQualString(operation), arguments, takes_lists});
  }
  return found;
}

const OpFacts& op_facts();         // op_facts.cpp
void set_op_facts(OpFacts facts);  // by take_op_facts (hooks.h); later calls change nothing
// Takes ops that stay in place out of the facts, before the first graph is looked at; later calls change
// nothing.
void leave_in_place(const Kinds& kinds);

}  // namespace tsfuser
