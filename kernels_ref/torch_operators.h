// torch's operators and tensors by its C functions, and over them what operators here need of its C++ interface.
//
// Only this file knows torch. It declares functions of torch/csrc/inductor/aoti_torch/c/shim.h that are the same from
// torch 2.7 on and that torch keeps stable. No header of torch is needed, and one library serves all versions.
//
// An operator is a function of tensors, numbers, booleans, names of instructions, optionals and lists of these, which
// returns a tensor, a number, a list or a tuple of tensors, or nothing:
//
//     const Operators operators = Operators("hpu_duo_x86_v3").add<scaled>("scaled(Tensor x, int by) -> Tensor");
//
// torch 2.7 passes neither lists nor strings to such functions. A function with lists becomes operators with an argument
// for each item, one for each number of items; names of instructions become numbers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct AtenTensorOpaque;
struct TorchLibraryOpaque;

extern "C" {
int32_t aoti_torch_delete_tensor_object(AtenTensorOpaque *tensor);
int32_t aoti_torch_new_tensor_handle(AtenTensorOpaque *tensor, AtenTensorOpaque **result);
int32_t aoti_torch_get_data_ptr(AtenTensorOpaque *tensor, void **result);
int32_t aoti_torch_get_dim(AtenTensorOpaque *tensor, int64_t *result);
int32_t aoti_torch_get_sizes(AtenTensorOpaque *tensor, int64_t **result);
int32_t aoti_torch_get_strides(AtenTensorOpaque *tensor, int64_t **result);
int32_t aoti_torch_get_dtype(AtenTensorOpaque *tensor, int32_t *result);
int32_t aoti_torch_copy_(AtenTensorOpaque *to, AtenTensorOpaque *from, int32_t non_blocking);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorOpaque **result);
int32_t aoti_torch_library_init_fragment(const char *name_space, const char *file, uint32_t line,
                                         TorchLibraryOpaque **result);
int32_t aoti_torch_library_init_impl(const char *name_space, const char *key, const char *file, uint32_t line,
                                     TorchLibraryOpaque **result);
int32_t aoti_torch_library_def(TorchLibraryOpaque *library, const char *schema);
int32_t aoti_torch_library_impl(TorchLibraryOpaque *library, const char *name,
                                void (*fn)(uint64_t *, uint64_t, uint64_t));
// Frees what an optional argument is in; torch before 2.13 has no function for it.
__attribute__((weak)) int32_t torch_delete_stable_ivalue(uint64_t *value);
// at::get_num_threads, which also applies torch.set_num_threads to a new thread.
__attribute__((weak)) int hpu_duo_num_threads() __asm__("_ZN2at15get_num_threadsEv");
__attribute__((weak)) int omp_get_max_threads();
}

namespace hpu_duo {

// The part of torch's C++ interface, by the same names.
namespace stable {
namespace {

// The numbers are torch's.
enum class ScalarType : int32_t {
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7, Bool = 11, BFloat16 = 15,
  Float8_e4m3fn = 24
};

constexpr ScalarType kByte = ScalarType::Byte, kChar = ScalarType::Char, kShort = ScalarType::Short,
                     kInt = ScalarType::Int, kLong = ScalarType::Long, kHalf = ScalarType::Half,
                     kFloat = ScalarType::Float, kDouble = ScalarType::Double, kBool = ScalarType::Bool,
                     kBFloat16 = ScalarType::BFloat16, kFloat8_e4m3fn = ScalarType::Float8_e4m3fn;

// Text of parts. Streams would need a newer standard library than torch does.
class Text {
 public:
  Text &operator<<(std::string_view part) { return text_ += part, *this; }
  Text &operator<<(char part) { return text_ += part, *this; }
  template <class T> std::enable_if_t<std::is_integral_v<T>, Text &> operator<<(T number) {
    return text_ += std::to_string(number), *this;
  }
  const std::string &string() const { return text_; }

 private:
  std::string text_;
};

[[maybe_unused]] Text &operator<<(Text &out, ScalarType type) {
  switch (type) {
    case kByte: return out << "Byte";
    case kChar: return out << "Char";
    case kShort: return out << "Short";
    case kInt: return out << "Int";
    case kLong: return out << "Long";
    case kHalf: return out << "Half";
    case kFloat: return out << "Float";
    case kDouble: return out << "Double";
    case kBool: return out << "Bool";
    case kBFloat16: return out << "BFloat16";
    case kFloat8_e4m3fn: return out << "Float8_e4m3fn";
  }
  return out << "dtype " << (int32_t)type;
}

[[maybe_unused]] int64_t item_bytes(ScalarType type) {
  switch (type) {
    case kByte: case kChar: case kBool: case kFloat8_e4m3fn: return 1;
    case kShort: case kHalf: case kBFloat16: return 2;
    case kLong: case kDouble: return 8;
    default: return 4;
  }
}

template <class T> struct TypeOf;
template <> struct TypeOf<uint8_t> { static constexpr ScalarType value = kByte; };
template <> struct TypeOf<int8_t> { static constexpr ScalarType value = kChar; };
template <> struct TypeOf<int16_t> { static constexpr ScalarType value = kShort; };
// Kernels have bfloat16 as its bits.
template <> struct TypeOf<uint16_t> { static constexpr ScalarType value = kBFloat16; };
template <> struct TypeOf<int32_t> { static constexpr ScalarType value = kInt; };
template <> struct TypeOf<int64_t> { static constexpr ScalarType value = kLong; };
template <> struct TypeOf<float> { static constexpr ScalarType value = kFloat; };
template <> struct TypeOf<double> { static constexpr ScalarType value = kDouble; };
template <> struct TypeOf<bool> { static constexpr ScalarType value = kBool; };

template <class Error, class... Parts> [[noreturn]] __attribute__((noinline, cold)) void refuse(const Parts &...parts) {
  Text text;
  (text << ... << parts);
  throw Error(text.string());
}

// Raise ValueError and IndexError with a message of parts, unless a condition is true.
#define TORCH_CHECK_VALUE(condition, ...) \
  if (!(condition)) ::hpu_duo::stable::refuse<std::invalid_argument>(__VA_ARGS__)
#define TORCH_CHECK_INDEX(condition, ...) \
  if (!(condition)) ::hpu_duo::stable::refuse<std::out_of_range>(__VA_ARGS__)

inline void check(int32_t error) {
  if (error) throw std::runtime_error("torch could not carry out what an operator needs");
}

class IntArrayRef {
 public:
  IntArrayRef(const int64_t *items, int64_t count) : items_(items), count_(count) {}
// As an argument only: the list lives as long as the call.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime"
  IntArrayRef(std::initializer_list<int64_t> items) : items_(items.begin()), count_((int64_t)items.size()) {}
#pragma GCC diagnostic pop
  IntArrayRef(const std::vector<int64_t> &items) : items_(items.data()), count_((int64_t)items.size()) {}

  const int64_t *begin() const { return items_; }
  const int64_t *end() const { return items_ + count_; }
  size_t size() const { return (size_t)count_; }
  int64_t operator[](int64_t n) const { return items_[n]; }
  IntArrayRef slice(int64_t begin, int64_t count) const { return {items_ + begin, count}; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  bool operator==(const IntArrayRef &other) const {
    return count_ == other.count_ && std::memcmp(items_, other.items_, (size_t)count_ * sizeof(int64_t)) == 0;
  }

 private:
  const int64_t *items_;
  int64_t count_;
};

[[maybe_unused]] Text &operator<<(Text &out, const IntArrayRef &items) {
  out << '[';
  for (size_t n = 0; n < items.size(); ++n) out << (n ? ", " : "") << items[(int64_t)n];
  return out << ']';
}

struct TensorOptions {
  ScalarType type;
  TensorOptions dtype(ScalarType other) const { return {other}; }
};

// A tensor on a CPU. Like torch's, a copy is the same tensor once more.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorOpaque *handle) : handle_(handle), is_owner_(true) {
    int64_t *sizes, *strides;
    check(aoti_torch_get_dim(handle, &dim_) | aoti_torch_get_sizes(handle, &sizes) |
          aoti_torch_get_strides(handle, &strides) | aoti_torch_get_data_ptr(handle, &data_) |
          aoti_torch_get_dtype(handle, (int32_t *)&type_));
    sizes_ = sizes, strides_ = strides;
  }
  Tensor(const Tensor &other) : Tensor(other.borrowed()) {
    if (handle_) check(aoti_torch_new_tensor_handle(other.handle_, &handle_));
    is_owner_ = handle_ != nullptr;
  }
  Tensor(Tensor &&other) noexcept { *this = std::move(other); }
  Tensor &operator=(const Tensor &other) { return *this = Tensor(other); }
  Tensor &operator=(Tensor &&other) noexcept {
    std::swap(handle_, other.handle_), std::swap(is_owner_, other.is_owner_), std::swap(data_, other.data_);
    std::swap(sizes_, other.sizes_), std::swap(strides_, other.strides_), std::swap(dim_, other.dim_);
    std::swap(type_, other.type_);
    return *this;
  }
  ~Tensor() {
    if (is_owner_) aoti_torch_delete_tensor_object(handle_);
  }

  int64_t dim() const { return dim_; }
  IntArrayRef sizes() const { return {sizes_, dim_}; }
  int64_t size(int64_t d) const { return sizes_[place(d)]; }
  int64_t stride(int64_t d) const { return strides_[place(d)]; }
  ScalarType scalar_type() const { return type_; }
  TensorOptions options() const { return {type_}; }
  void *data_ptr() const { return data_; }
  const void *const_data_ptr() const { return data_; }
  template <class T> T *data_ptr() const {
    TORCH_CHECK_VALUE(type_ == TypeOf<T>::value, "expected ", TypeOf<T>::value, ", got ", type_, " ", sizes());
    return (T *)data_;
  }
  template <class T> const T *const_data_ptr() const { return data_ptr<T>(); }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes()) count *= size;
    return count;
  }
  bool is_contiguous() const {
    int64_t step = 1;
    for (int64_t d = dim_ - 1; d >= 0; step *= sizes_[d--])
      if (sizes_[d] != 1 && strides_[d] != step) return numel() == 0;
    return true;
  }

  // This tensor without a reference to it: it must live longer than the result.
  Tensor borrowed() const {
    Tensor same;
    same.handle_ = handle_, same.data_ = data_, same.sizes_ = sizes_, same.strides_ = strides_;
    same.dim_ = dim_, same.type_ = type_;
    return same;
  }
  // This tensor, borrowed, if it is contiguous, else a copy.
  Tensor contiguous() const & { return is_contiguous() ? borrowed() : copy(sizes(), type_); }
  Tensor contiguous() && { return is_contiguous() ? std::move(*this) : copy(sizes(), type_); }
  Tensor to(ScalarType type) const { return copy(sizes(), type); }
  // A contiguous copy that is broadcast to a shape.
  Tensor copy(IntArrayRef sizes, ScalarType type) const;

  // The handle with its reference, for torch.
  AtenTensorOpaque *release() {
    if (!is_owner_ && handle_) check(aoti_torch_new_tensor_handle(handle_, &handle_));
    is_owner_ = false;
    return handle_;
  }

 private:
  int64_t place(int64_t d) const {
    const int64_t found = d < 0 ? d + dim_ : d;
    TORCH_CHECK_VALUE(found >= 0 && found < dim_, "expected a tensor with dimension ", d, ", got ", sizes());
    return found;
  }

  AtenTensorOpaque *handle_ = nullptr;
  bool is_owner_ = false;
  ScalarType type_ = kFloat;
  void *data_ = nullptr;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  int64_t dim_ = 0;
};

using TensorList = std::vector<Tensor>;

[[maybe_unused]] Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, TensorOptions options) {
  AtenTensorOpaque *handle;
  check(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.begin(), strides.begin(), (int32_t)options.type, 0, 0,
                                 &handle));
  return Tensor(handle);
}

[[maybe_unused]] Tensor empty(IntArrayRef sizes, TensorOptions options) {
  constexpr int64_t kMost = 16;
  int64_t strides[kMost], step = 1;
  const int64_t dim = (int64_t)sizes.size();
  TORCH_CHECK_VALUE(dim <= kMost, "expected at most ", kMost, " dimensions, got ", sizes);
  for (int64_t d = dim - 1; d >= 0; step *= sizes[d] > 1 ? sizes[d] : 1, --d) strides[d] = step;
  return empty_strided(sizes, {strides, dim}, options);
}

[[maybe_unused]] Tensor zeros(IntArrayRef sizes, TensorOptions options) {
  Tensor result = empty(sizes, options);
  std::memset(result.data_ptr(), 0, (size_t)(result.numel() * item_bytes(options.type)));
  return result;
}

inline Tensor Tensor::copy(IntArrayRef sizes, ScalarType type) const {
  Tensor result = empty(sizes, {type});
  check(aoti_torch_copy_(result.handle_, handle_, 0));
  return result;
}

// A contiguous copy with the last dimension filled up with zeros.
[[maybe_unused]] Tensor filled_up(const Tensor &x, int64_t width) {
  std::vector<int64_t> shape = x.sizes().vec();
  const Tensor from = x.contiguous();
  const int64_t old = shape.back() * item_bytes(x.scalar_type()), bytes = width * item_bytes(x.scalar_type());
  shape.back() = width;
  Tensor result = zeros(shape, x.options());
  for (int64_t row = 0, rows = result.numel() / width; row < rows; ++row)
    std::memcpy((char *)result.data_ptr() + row * bytes, (const char *)from.data_ptr() + row * old, (size_t)old);
  return result;
}

inline int get_num_threads() {
  return &hpu_duo_num_threads ? hpu_duo_num_threads() : &omp_get_max_threads ? omp_get_max_threads() : 1;
}

}  // namespace
}  // namespace stable

namespace {

// What instructions an operator may be asked for; the numbers are those of kernels_ref/x86/library.py.
constexpr std::string_view kInstructionNames[] = {"best", "vectors", "tiles", "model", "avx2", "avx512"};

// An argument as torch passes it; a list takes `count` of them.
template <class T> struct Argument {
  static constexpr bool is_list = false;
  static T read(const uint64_t *&next, uint64_t) {
    const uint64_t value = *next++;
    if constexpr (std::is_same_v<T, stable::Tensor>) {
      return stable::Tensor((AtenTensorOpaque *)value);
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      return value < std::size(kInstructionNames) ? kInstructionNames[value] : "another number";
    } else if constexpr (std::is_same_v<T, stable::ScalarType>) {
      return (T)(int8_t)value;  // what torch 2.7 has in the other bytes does not count
    } else {
      static_assert(std::is_same_v<T, int64_t> || std::is_same_v<T, bool> || std::is_same_v<T, double>);
      T result;
      std::memcpy(&result, &value, sizeof result);
      return result;
    }
  }
};

template <class T> struct Argument<std::optional<T>> {
  static constexpr bool is_list = false;
  static std::optional<T> read(const uint64_t *&next, uint64_t count) {
    uint64_t *box = (uint64_t *)*next++;
    if (!box) return std::nullopt;
    const uint64_t value = *box, *at = &value;
    if (&torch_delete_stable_ivalue)
      torch_delete_stable_ivalue(box);
    else
      delete box;
    return Argument<T>::read(at, count);
  }
};

template <class T> struct Argument<std::vector<T>> {
  static constexpr bool is_list = true;
  static std::vector<T> read(const uint64_t *&next, uint64_t count) {
    std::vector<T> items;
    items.reserve(count);
    for (uint64_t n = 0; n < count; ++n) items.push_back(Argument<T>::read(next, 1));
    return items;
  }
};

inline uint64_t to_torch(stable::Tensor &result) { return (uint64_t)result.release(); }
inline uint64_t to_torch(const int64_t &result) { return (uint64_t)result; }
inline uint64_t to_torch(const bool &result) { return result; }

template <class T> void return_to_torch(T &result, uint64_t *stack, uint64_t) { *stack = to_torch(result); }
template <class... Ts> void return_to_torch(std::tuple<Ts...> &results, uint64_t *stack, uint64_t) {
  std::apply([&](auto &...each) { ((*stack++ = to_torch(each)), ...); }, results);
}
[[maybe_unused]] void return_to_torch(std::vector<stable::Tensor> &results, uint64_t *stack, uint64_t count) {
  TORCH_CHECK_VALUE(results.size() == count, "expected an operator with ", results.size(), " results, got ", count);
  for (stable::Tensor &each : results) *stack++ = to_torch(each);
}

template <auto fn, class Result, class... Parameters>
void call(Result (*)(Parameters...), uint64_t *stack, uint64_t num_arguments, uint64_t num_results) {
  constexpr uint64_t num_lists = (Argument<std::decay_t<Parameters>>::is_list + ... + 0);
  const uint64_t count = num_lists ? (num_arguments - (sizeof...(Parameters) - num_lists)) / num_lists : 1;
  const uint64_t *next = stack;
  // In the order of arguments, and all of them: they are ours to free.
  std::tuple<std::decay_t<Parameters>...> arguments{Argument<std::decay_t<Parameters>>::read(next, count)...};
  if constexpr (std::is_void_v<Result>) {
    std::apply(fn, arguments);
  } else {
    auto result = std::apply(fn, arguments);
    return_to_torch(result, stack, num_results);
  }
}

template <auto fn> void boxed(uint64_t *stack, uint64_t num_arguments, uint64_t num_results) {
  call<fn>(fn, stack, num_arguments, num_results);
}

// Registers operators of a namespace when the library is loaded.
class Operators {
 public:
  explicit Operators(const char *name_space) : name_space_(name_space) {
    stable::check(aoti_torch_library_init_fragment(name_space, "", 0, &schemas_));
  }

  // An operator for tensors on CPUs.
  template <auto fn> Operators &add(const std::string &schema) { return implement(schema, "CPU", boxed<fn>); }
  // One without tensors among its arguments.
  template <auto fn> Operators &add_plain(const std::string &schema) {
    return implement(schema, "CompositeExplicitAutograd", boxed<fn>);
  }
  // Operators of a function with lists, for two to eight items in each: `name.n2` and so on. If it returns a list, that
  // has as many items.
  template <auto fn> Operators &add_lists(const std::string &schema) {
    for (int count = 2; count <= 8; ++count) implement(spread(schema, "n", count, count), "CPU", boxed<fn>);
    return *this;
  }
  // An operator of a function with one list, for a number of items and of results: `name.i3o2`.
  template <auto fn> void add_sizes(const std::string &schema, int64_t items, int64_t results) {
    const char *key = items ? "CPU" : "CompositeExplicitAutograd";
    implement(spread(schema, "i", items, results, "o" + std::to_string(results)), key, boxed<fn>);
  }

 private:
  // "f(Tensor[] x) -> Tensor[]" for two items: "f.n2(Tensor x0, Tensor x1) -> (Tensor, Tensor)".
  static std::string spread(const std::string &schema, const char *letter, int64_t items, int64_t results,
                            const std::string &suffix = "") {
    const size_t open = schema.find('('), close = schema.rfind(')');
    std::string result = schema.substr(0, open) + "." + letter + std::to_string(items) + suffix + "(";
    for (size_t begin = open + 1, end; begin < close; begin = end + 1) {
      end = std::min(schema.find(',', begin), close);
      std::string part = schema.substr(begin, end - begin);
      part.erase(0, part.find_first_not_of(' '));
      const size_t list = part.find("[] ");
      if (list != std::string::npos && !items) continue;
      if (result.back() != '(') result += ", ";
      if (list == std::string::npos) {
        result += part;
        continue;
      }
      for (int64_t n = 0; n < items; ++n)
        result += (n ? ", " : "") + part.substr(0, list) + " " + part.substr(list + 3) + std::to_string(n);
    }
    if (schema.find("[]", close) == std::string::npos) return result + schema.substr(close);
    result += ") -> (Tensor";
    for (int64_t n = 1; n < results; ++n) result += ", Tensor";
    return result + ")";
  }

  Operators &implement(const std::string &schema, const char *key, void (*fn)(uint64_t *, uint64_t, uint64_t)) {
    TorchLibraryOpaque *library;
    stable::check(aoti_torch_library_def(schemas_, schema.c_str()));
    stable::check(aoti_torch_library_init_impl(name_space_, key, "", 0, &library));
    stable::check(aoti_torch_library_impl(library, schema.substr(0, schema.find('(')).c_str(), fn));
    return *this;
  }

  const char *name_space_;
  TorchLibraryOpaque *schemas_;
};

}  // namespace
}  // namespace hpu_duo
