#include "graph/written_types.h"

#include <ATen/core/jit_type.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace tsfuser {

IValue tuple(Items items) { return c10::ivalue::Tuple::create(std::move(items)); }

c10::ArrayRef<IValue> elements(const IValue& written) {
  return written.toTupleRef().elements().asArrayRef();
}

namespace {

template <typename T>
IValue optional(const std::optional<T>& value) {
  return value ? IValue(static_cast<int64_t>(*value)) : IValue();
}

template <typename T>
std::optional<T> read_optional(const IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<T>(static_cast<T>(value.toInt()));
}

const std::map<std::string, c10::TypePtr>& simple_types() {
  static const auto* types = new std::map<std::string, c10::TypePtr>{
      {"int", c10::IntType::get()},         {"float", c10::FloatType::get()},
      {"complex", c10::ComplexType::get()}, {"bool", c10::BoolType::get()},
      {"str", c10::StringType::get()},      {"None", c10::NoneType::get()},
      {"number", c10::NumberType::get()},   {"device", c10::DeviceObjType::get()},
      {"any", c10::AnyType::get()},         {"generator", c10::GeneratorType::get()},
  };
  return *types;
}

IValue write_tensor_type(const c10::TensorType& type) {
  IValue sizes, strides;
  if (const auto rank = type.symbolic_sizes().rank()) {
    Items found;
    for (size_t i = 0; i < *rank; ++i) {
      const c10::ShapeSymbol size = type.symbolic_sizes()[i];
      found.push_back(size.is_static() ? IValue(size.static_size()) : IValue());
    }
    sizes = tuple(std::move(found));
  }
  if (const auto known = type.stride_properties().sizes()) {
    Items found;
    for (const auto& stride : *known) {
      found.push_back(stride ? tuple({optional(stride->stride_index_), optional(stride->contiguous_),
                                      optional(stride->stride_)})
                             : IValue());
    }
    strides = tuple(std::move(found));
  }
  const IValue device = type.device() ? IValue(type.device()->str()) : IValue();
  return tuple({"tensor", optional(type.scalarType()), device, sizes, strides, optional(type.requiresGrad()),
                optional(type.undefined())});
}

c10::TypePtr read_tensor_type(c10::ArrayRef<IValue> written) {
  const std::optional<c10::Device> device =
      written.at(2).isNone() ? std::nullopt
                             : std::optional<c10::Device>(c10::Device(written.at(2).toStringRef()));
  c10::SymbolicShape sizes;
  if (!written.at(3).isNone()) {
    std::vector<std::optional<int64_t>> found;
    for (const IValue& size : elements(written.at(3))) {
      found.push_back(read_optional<int64_t>(size));
    }
    sizes = c10::SymbolicShape(found);
  }
  c10::VaryingShape<c10::Stride> strides;
  if (!written.at(4).isNone()) {
    std::vector<std::optional<c10::Stride>> found;
    for (const IValue& stride : elements(written.at(4))) {
      if (stride.isNone()) {
        found.emplace_back(std::nullopt);
        continue;
      }
      const auto parts = elements(stride);
      found.emplace_back(c10::Stride(read_optional<size_t>(parts.at(0)), read_optional<bool>(parts.at(1)),
                                     read_optional<size_t>(parts.at(2))));
    }
    strides = c10::VaryingShape<c10::Stride>(std::move(found));
  }
  return c10::TensorType::create(read_optional<c10::ScalarType>(written.at(1)), device, std::move(sizes),
                                 std::move(strides), read_optional<bool>(written.at(5)),
                                 read_optional<bool>(written.at(6)));
}

}  // namespace

IValue write_type(const c10::TypePtr& type) {
  if (const auto tensor = type->cast<c10::TensorType>()) {
    return write_tensor_type(*tensor);
  }
  Items contained;
  for (const c10::TypePtr& inner : type->containedTypes()) {
    contained.push_back(write_type(inner));
  }
  if (type->kind() == c10::TypeKind::ListType) {
    return tuple({"list", contained.at(0)});
  }
  if (type->kind() == c10::TypeKind::OptionalType) {
    return tuple({"optional", contained.at(0)});
  }
  if (type->kind() == c10::TypeKind::TupleType && !type->expectRef<c10::TupleType>().schema()) {
    return tuple({"tuple", tuple(std::move(contained))});
  }
  for (const auto& [name, simple] : simple_types()) {
    if (*simple == *type) {
      return tuple({name});
    }
  }
  throw std::invalid_argument("a value of type " + type->str() + " cannot be stored");
}

c10::TypePtr read_type(const IValue& value) {
  const auto written = elements(value);
  const std::string& kind = written.at(0).toStringRef();
  if (kind == "tensor") {
    return read_tensor_type(written);
  }
  if (kind == "list") {
    return c10::ListType::create(read_type(written.at(1)));
  }
  if (kind == "optional") {
    return c10::OptionalType::create(read_type(written.at(1)));
  }
  if (kind == "tuple") {
    std::vector<c10::TypePtr> types;
    for (const IValue& element : elements(written.at(1))) {
      types.push_back(read_type(element));
    }
    return c10::TupleType::create(std::move(types));
  }
  return simple_types().at(kind);
}

}  // namespace tsfuser
