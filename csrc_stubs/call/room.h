// Tensors with room: behind each row, or behind each matrix, lie zeros, as far as whole accesses reach.
//
// In: a batch of products of 16 bits, whose matrices have 49 rows and columns, say. Out: products of
// matrices of 56, of which the results are parts, in half the time: the libraries that multiply read 16
// bytes at a time where all rows begin at a multiple of that, and hold whole accesses. The kernel that makes
// such an operand stores the zeros (codegen/runtime/room.h), and its plan marks the tensor: nothing else
// tells what lies between its elements. Views are not marked, but for those of `transposed_with_room`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tsfuser {

constexpr int64_t kAccess = 8;  // elements of 16 bits; `WHOLE_ACCESS` of ir/layout.py

inline int64_t whole_accesses(int64_t size) { return (size + kAccess - 1) / kAccess * kAccess; }

// Zeros lie behind dim `dim`, -1 or -2, up to `whole_accesses` of its size; behind both dims of a matrix.
// `detach` and saved tensors keep the mark; it holds while the tensor has the memory and the strides that it
// has now.
void mark_room(const at::Tensor& tensor, int64_t dim);

// That dim; 0 for none.
int64_t dim_with_room(const at::Tensor& tensor);

// Whether zeros lie behind dim `dim`, -1 or -2.
bool has_room(const at::Tensor& tensor, int64_t dim);

}  // namespace tsfuser
