#include "penstock/model/safetensors.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

#include "model/expect_error.h"
#include "model/temp_dir.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using testing::expect_error;
using testing::read_file;
using testing::TempDir;

// The bytes of a file: length, header, data.
std::string file_bytes(std::string_view header, std::string_view data, std::uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes.append(header).append(data);
}
std::string file_bytes(std::string_view header, std::string_view data) {
  return file_bytes(header, data, header.size());
}

std::vector<NamedTensor> parse(std::string_view header, std::uint64_t data_bytes) {
  return parse_safetensors_header(header, nullptr, data_bytes, nullptr);
}

void refuses(std::string_view header, std::uint64_t data_bytes,
             std::initializer_list<std::string_view> words) {
  expect_error(ErrorKind::kInvalidArgument, words, [&] { parse(header, data_bytes); });
}

NamedTensor tensor(std::string name, DType dtype, std::initializer_list<std::int64_t> shape,
                   const void* data) {
  NamedTensor t;
  t.name = std::move(name);
  t.view.data = data;
  t.view.dtype = dtype;
  t.view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), t.view.shape.begin());
  return t;
}

// ---- headers that are right ---------------------------------------------------------------------

TEST(SafetensorsHeaderTest, GivesTensorsInOffsetOrder) {
  std::map<std::string, std::string> metadata;
  const std::byte data[24] = {};
  const auto tensors = parse_safetensors_header(
      R"({"b":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},
          "a":{"shape":[8],"data_offsets":[0,8],"dtype":"U8"},
          "__metadata__":{"format":"pt"}}   )",
      data, 24, &metadata);
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].view.data, data);
  EXPECT_EQ(tensors[1].name, "b");
  EXPECT_EQ(tensors[1].view.data, data + 8);
  EXPECT_EQ(describe(tensors[1].view), "[2, 2] F32");
  EXPECT_EQ(metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
}

TEST(SafetensorsHeaderTest, AcceptsEmptyTensorsScalarsAndSixDimensions) {
  const auto tensors = parse(
      R"({"scalar":{"dtype":"F64","shape":[],"data_offsets":[0,8]},
          "none":{"dtype":"F32","shape":[3,0],"data_offsets":[8,8]},
          "start":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
          "six":{"dtype":"U8","shape":[1,2,1,3,1,2],"data_offsets":[8,20]}})",
      20);
  ASSERT_EQ(tensors.size(), 4U);
  EXPECT_EQ(tensors[0].name, "start");
  EXPECT_EQ(tensors[1].name, "scalar");
  EXPECT_EQ(tensors[1].view.elements(), 1);
  EXPECT_EQ(tensors[2].name, "none");
  EXPECT_EQ(tensors[2].view.elements(), 0);
  EXPECT_EQ(tensors[3].view.rank, 6);
  EXPECT_TRUE(parse("{}", 0).empty());
}

TEST(SafetensorsHeaderTest, KnowsEveryDtypeByItsPublishedName) {
  const std::pair<const char*, std::uint64_t> kBytesOf8[] = {
      {"F64", 64},    {"I64", 64},    {"F32", 32},    {"I32", 32}, {"BF16", 16},
      {"F16", 16},    {"I16", 16},    {"I8", 8},      {"U8", 8},   {"BOOL", 8},
      {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4}};
  for (const auto& [name, bytes] : kBytesOf8) {
    const std::string text = std::string(R"({"t":{"dtype":")") + name +
                             R"(","shape":[8],"data_offsets":[0,)" + std::to_string(bytes) + "]}}";
    EXPECT_EQ(to_string(parse(text, bytes).front().view.dtype), name);
    refuses(text, bytes - 1, {"'t'", "truncated"});
  }
}

// ---- hostile headers ----------------------------------------------------------------------------

TEST(SafetensorsHeaderTest, RefusesTextThatIsNoHeader) {
  refuses("", 0, {"'{'"});
  refuses("[]", 0, {"'{'"});
  refuses(" {}", 0, {"'{'"});
  refuses("{", 0, {"not valid JSON"});
  refuses("{}{}", 0, {"not valid JSON"});
  refuses("{\"a\xff\":1}", 0, {"not valid JSON"});
  refuses(R"({"a":1})", 0, {"'a'", "object", "number"});
  refuses(R"({"a":null})", 0, {"'a'", "object"});
  refuses(R"({"__metadata__":[]})", 0, {"__metadata__", "list"});
  refuses(R"({"__metadata__":{"x":1}})", 0, {"__metadata__", "'x'", "string"});
  refuses("{\"a\":" + std::string(1000000, '['), 0, {"nested"});
}

TEST(SafetensorsHeaderTest, RefusesDuplicateNames) {
  refuses(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
              "a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
          2, {"'a'", "twice"});
  refuses(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
          {"'dtype'", "twice"});
  // The same name spelt with an escape.
  refuses(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},
              "\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          0, {"'a'", "twice"});
  refuses(R"({"__metadata__":{},"__metadata__":{}})", 0, {"__metadata__", "twice"});
}

TEST(SafetensorsHeaderTest, RefusesMissingUnknownAndMistypedFields) {
  refuses(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1, {"'t'", "'dtype'", "missing"});
  refuses(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"'shape'", "missing"});
  refuses(R"({"t":{"dtype":"U8","shape":[1]}})", 1, {"'data_offsets'", "missing"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}})", 1,
          {"unknown field 'strides'"});
  refuses(R"({"t":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, {"dtype", "string"});
  refuses(R"({"t":{"dtype":"F24","shape":[1],"data_offsets":[0,3]}})", 3, {"unknown dtype 'F24'"});
  refuses(R"({"t":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", 4, {"unknown dtype 'f32'"});
  refuses(R"({"t":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, {"shape", "list"});
  refuses(R"({"t":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, {"shape", "integers"});
  refuses(R"({"t":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, {"shape", "string"});
  refuses(R"({"t":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}})", 1, {"shape", "boolean"});
  refuses(R"({"t":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, {"shape holds -1"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, {"data_offsets", "two"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, {"two"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1.0]}})", 1, {"integers"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1, {"-1"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, {"backwards"});
  refuses(R"({"t":{"dtype":"U8","shape":[1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
          {"7 dimensions", "6"});
}

TEST(SafetensorsHeaderTest, RefusesSizesThatOverflow) {
  refuses(R"({"t":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
          {"overflow"});
  // 2^61 doubles are 2^64 bytes: a product in bytes would wrap to zero.
  refuses(R"({"t":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
          {"overflow"});
  // A zero dimension does not hide what would overflow on the way to it.
  refuses(R"({"t":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0,
          {"overflow"});
  refuses(R"({"t":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0,
          {"18446744073709551615"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}})", 1,
          {"18446744073709551615"});
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}})", 1,
          {"integers"});
}

TEST(SafetensorsHeaderTest, RefusesLengthsThatDoNotFitTheShape) {
  refuses(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, {"'t'", "4", "8"});
  refuses(R"({"t":{"dtype":"BF16","shape":[2],"data_offsets":[0,8]}})", 8, {"8", "4"});
  refuses(R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, {"whole bytes"});
  refuses(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,1]}})", 1, {"1 bytes", "needs 0"});
}

TEST(SafetensorsHeaderTest, RefusesOverlapsGapsAndTruncation) {
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
              "b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
          7, {"'b'", "overlaps"});
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
              "b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          4, {"'b'", "overlaps"});
  // An empty tensor inside another one.
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
              "b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
          4, {"'b'", "overlaps"});
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
              "b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
          9, {"gap before tensor 'b'", "4 .. 5"});
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5, {"gap before tensor 'a'"});
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5, {"gap at the end", "1"});
  refuses("{}", 1, {"gap at the end"});
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3, {"truncated", "4 of 3"});
}

// ---- files --------------------------------------------------------------------------------------

void refuses_file(const std::string& path, std::initializer_list<std::string_view> words) {
  expect_error(ErrorKind::kInvalidArgument, words, [&] { SafetensorsFile{path}; });
}

TEST(SafetensorsFileTest, RefusesWhatIsNoFile) {
  const TempDir dir;
  refuses_file(dir.file("absent"), {dir.file("absent"), "No such file"});
  refuses_file(dir.path(), {dir.path(), "not a regular file"});
  ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
  refuses_file(dir.file("fifo"), {"fifo", "not a regular file"});
  refuses_file("/dev/null", {"/dev/null", "not a regular file"});
}

TEST(SafetensorsFileTest, RefusesLengthsThatTheFileDoesNotHave) {
  const TempDir dir;
  refuses_file(dir.write("empty", ""), {"empty", "0 bytes"});
  refuses_file(dir.write("short", "1234567"), {"short", "7 bytes"});
  refuses_file(dir.write("claims", file_bytes("{}", "", 3)), {"claims 3 bytes", "2"});
  refuses_file(dir.write("huge", file_bytes("{}", "", 100'000'001)), {"100000001", "at most"});
  refuses_file(dir.write("max", file_bytes("{}", "", ~std::uint64_t{0})),
               {"18446744073709551615", "at most"});
  refuses_file(dir.write("zero", file_bytes("", "", 0)), {"zero", "'{'"});
  refuses_file(
      dir.write("cut",
                file_bytes(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abc")),
      {"cut", "'t'", "truncated"});
}

TEST(SafetensorsFileTest, RefusesAHeaderOverTheLimitEvenWhereItIsThere) {
  const TempDir dir;
  std::string header = "{}";
  header.resize(100'000'001, ' ');
  refuses(header, 0, {"100000001", "at most"});
  refuses_file(dir.write("big", file_bytes(header, "")), {"100000001", "at most"});
}

TEST(SafetensorsFileTest, MapsAlignedFilesAndFindsByName) {
  const TempDir dir;
  // 8 + 56 bytes put the data on a multiple of 64.
  std::string header = R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  header.resize(56, ' ');
  const float value = 1.5F;
  std::string data(4, '\0');
  std::memcpy(data.data(), &value, 4);
  SafetensorsFile file(dir.write("f", file_bytes(header, data)));
  EXPECT_TRUE(file.is_mapped());
  EXPECT_EQ(file.path(), dir.file("f"));
  ASSERT_NE(file.find("t"), nullptr);
  EXPECT_EQ(*file.at("t").as<float>(), 1.5F);
  EXPECT_EQ(file.find("u"), nullptr);
  expect_error(ErrorKind::kInvalidArgument, {"'u'", dir.file("f")}, [&] { file.at("u"); });
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(*moved.at("t").as<float>(), 1.5F);
}

TEST(SafetensorsFileTest, CopiesUnalignedFilesToAlignedMemory) {
  const TempDir dir;
  // An odd header, and an F32 and an F64 behind three bytes: no shift of the file aligns both.
  const std::string header = R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                             R"("f":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},)"
                             R"("d":{"dtype":"F64","shape":[1],"data_offsets":[11,19]}})";
  const float floats[2] = {2.5F, -3.0F};
  const double number = 1e100;
  std::string data = "xyz";
  data.append(reinterpret_cast<const char*>(floats), 8);
  data.append(reinterpret_cast<const char*>(&number), 8);
  const SafetensorsFile file(dir.write("f", file_bytes(header, data)));
  EXPECT_FALSE(file.is_mapped());
  EXPECT_EQ(std::memcmp(file.at("b").data, "xyz", 3), 0);
  const TensorView& f = file.at("f");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(f.data) % alignof(float), 0U);
  EXPECT_EQ(f.as<float>()[0], 2.5F);
  EXPECT_EQ(f.as<float>()[1], -3.0F);
  const TensorView& d = file.at("d");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(d.data) % alignof(double), 0U);
  EXPECT_EQ(*d.as<double>(), 1e100);
  // Nothing is given away that could not be read again.
  file.release(f);
  EXPECT_EQ(f.as<float>()[1], -3.0F);
}

TEST(SafetensorsFileTest, OpensTheGoldenFile) {
  const SafetensorsFile file(PENSTOCK_TEST_MODELS "/tiny-glm/golden.safetensors");
  EXPECT_TRUE(file.at("doc.logits").has_shape({16, 256}));
  EXPECT_TRUE(file.at("doc.tokens").has_shape({1500}));
  EXPECT_EQ(file.at("doc.tokens").dtype, DType::kI32);
  EXPECT_FALSE(file.metadata().empty());
}

// Resident kilobytes of a file's mappings.
std::int64_t resident_kb(const std::string& path) {
  std::ifstream smaps("/proc/self/smaps");
  std::int64_t total = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') < line.find(' ')) inside = line.ends_with(path);
    if (inside && line.starts_with("Rss:")) total += std::stoll(line.substr(4));
  }
  return total;
}

TEST(SafetensorsFileTest, ReleaseGivesThePagesOfOneTensorBack) {
  const TempDir dir;
  std::vector<std::uint8_t> bytes(8 << 20);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 31 >> 8);
  const std::string path = dir.file("f");
  write_safetensors(
      path, std::vector<NamedTensor>{tensor("a", DType::kU8, {4 << 20}, bytes.data()),
                                     tensor("b", DType::kU8, {4 << 20}, bytes.data() + (4 << 20))});
  const SafetensorsFile file(path);
  const auto sum = [&](const char* name) {
    const TensorView& view = file.at(name);
    return std::accumulate(view.as<std::uint8_t>(), view.as<std::uint8_t>() + view.bytes(),
                           std::uint64_t{0});
  };
  const std::uint64_t a = sum("a");
  const std::uint64_t b = sum("b");
  EXPECT_GE(resident_kb(path), 8 << 10);
  file.release(file.at("a"));
  EXPECT_LE(resident_kb(path), (4 << 10) + 64);
  EXPECT_GE(resident_kb(path), (4 << 10) - 64);  // b's pages stay
  EXPECT_EQ(sum("a"), a);
  EXPECT_EQ(sum("b"), b);
}

// ---- writing ------------------------------------------------------------------------------------

TEST(SafetensorsWriterTest, KeepsOrderShapesMetadataAndAlignsTheData) {
  const TempDir dir;
  const std::uint8_t bytes[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  write_safetensors(
      dir.file("f"),
      std::vector<NamedTensor>{tensor("z", DType::kBF16, {2, 2}, bytes),
                               tensor("a \"quoted\" \xc3\xa9", DType::kE4M3, {3}, bytes),
                               tensor("none", DType::kF32, {0, 5}, nullptr),
                               tensor("four", DType::kE2M1, {2, 4}, bytes),
                               tensor("scale", DType::kE8M0, {1}, bytes)},
      {{"format", "pt"}, {"note", "x"}});
  const SafetensorsFile file(dir.file("f"));
  std::vector<std::string> names;
  for (const NamedTensor& t : file.tensors()) names.push_back(t.name);
  // The empty tensor shares an offset with its successor and sorts before it.
  EXPECT_EQ(names,
            (std::vector<std::string>{"z", "a \"quoted\" \xc3\xa9", "none", "four", "scale"}));
  EXPECT_EQ(file.metadata().at("note"), "x");
  EXPECT_EQ(describe(file.at("four")), "[2, 4] F4");
  EXPECT_EQ(std::memcmp(file.at("four").data, bytes, 4), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.at("z").data) % 64, 0U);
  EXPECT_EQ(dir.entries(), 1U);
}

TEST(SafetensorsWriterTest, ReplacesAFile) {
  const TempDir dir;
  dir.write("f", "old");
  const std::uint8_t byte = 7;
  write_safetensors(dir.file("f"), std::vector<NamedTensor>{tensor("t", DType::kU8, {1}, &byte)});
  EXPECT_EQ(*SafetensorsFile(dir.file("f")).at("t").as<std::uint8_t>(), 7);
  EXPECT_EQ(dir.entries(), 1U);
}

TEST(SafetensorsWriterTest, RefusesTensorsThatNoReaderWouldTake) {
  const TempDir dir;
  const std::uint8_t bytes[8] = {};
  const auto refuse = [&](std::vector<NamedTensor> tensors,
                          std::initializer_list<std::string_view> words) {
    expect_error(ErrorKind::kInvalidArgument, words,
                 [&] { write_safetensors(dir.file("f"), tensors); });
  };
  refuse({tensor("a", DType::kU8, {1}, bytes), tensor("a", DType::kU8, {1}, bytes)}, {"'a'"});
  refuse({tensor("__metadata__", DType::kU8, {1}, bytes)}, {"__metadata__"});
  refuse({tensor("a", DType::kE2M1, {3}, bytes)}, {"'a'", "whole bytes"});
  refuse({tensor("a", DType::kU8, {-1}, bytes)}, {"'a'", "negative"});
  refuse({tensor("a", DType::kF64, {std::int64_t{1} << 61}, bytes)}, {"'a'", "overflow"});
  refuse({tensor("a", DType::kU8, {1}, nullptr)}, {"'a'", "no data"});
  refuse({tensor("\xff", DType::kU8, {1}, bytes)}, {"UTF-8"});
  NamedTensor seven = tensor("a", DType::kU8, {1}, bytes);
  seven.view.rank = 7;
  refuse({seven}, {"'a'", "rank 7"});
  EXPECT_EQ(dir.entries(), 0U);
}

TEST(SafetensorsWriterTest, LeavesNothingBehindOnFailure) {
  const TempDir dir;
  std::vector<std::uint8_t> bytes(1 << 20);
  const std::vector<NamedTensor> tensors = {tensor("t", DType::kU8, {1 << 20}, bytes.data())};
  expect_error(ErrorKind::kBackend, {"No such file", dir.file("missing/f")},
               [&] { write_safetensors(dir.file("missing/f"), tensors); });

  // The target cannot be replaced: it is a directory with something in it.
  ASSERT_EQ(::mkdir(dir.file("d").c_str(), 0700), 0);
  dir.write("d/x", "");
  expect_error(ErrorKind::kBackend, {"rename", dir.file("d")},
               [&] { write_safetensors(dir.file("d"), tensors); });
  EXPECT_EQ(dir.entries(), 1U);

  // The device is full, as far as this process can tell: the old file stays as it was.
  dir.write("f", "old");
  struct rlimit old_limit {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  auto* const old_handler = ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 512 << 10, old_limit.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorKind::kBackend, {"write", "File too large"},
               [&] { write_safetensors(dir.file("f"), tensors); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_file(dir.file("f")), "old");
  EXPECT_EQ(dir.entries(), 2U);
}

// ---- properties ---------------------------------------------------------------------------------

RC_GTEST_PROP(SafetensorsProperty, WhatIsWrittenIsRead, ()) {
  const TempDir dir;
  const DType dtypes[] = {DType::kF64,  DType::kF32,  DType::kBF16, DType::kF16, DType::kE4M3,
                          DType::kE5M2, DType::kE8M0, DType::kE2M1, DType::kI64, DType::kI32,
                          DType::kI16,  DType::kI8,   DType::kU8,   DType::kBool};
  std::vector<std::vector<std::uint8_t>> storage;
  std::vector<NamedTensor> tensors;
  const int count = *rc::gen::inRange(0, 8);
  for (int i = 0; i < count; ++i) {
    NamedTensor t;
    t.name = *rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)) + std::to_string(i);
    t.view.dtype = dtypes[*rc::gen::inRange(0, 14)];
    t.view.rank = *rc::gen::inRange(0, kMaxRank + 1);
    for (int d = 0; d < t.view.rank; ++d) {
      t.view.shape[static_cast<std::size_t>(d)] = *rc::gen::inRange(0, 4);
    }
    if (t.view.dtype == DType::kE2M1) {  // pairs only
      t.view.rank = std::max(t.view.rank, 1);
      t.view.shape[0] = 2 * *rc::gen::inRange(0, 4);
    }
    storage.push_back(*rc::gen::container<std::vector<std::uint8_t>>(
        static_cast<std::size_t>(t.view.bytes()), rc::gen::arbitrary<std::uint8_t>()));
    t.view.data = storage.back().data();
    tensors.push_back(t);
  }
  write_safetensors(dir.file("f"), tensors);
  const SafetensorsFile file(dir.file("f"));
  RC_ASSERT(file.tensors().size() == tensors.size());
  for (const NamedTensor& want : tensors) {
    const TensorView& got = file.at(want.name);
    RC_ASSERT(describe(got) == describe(want.view));
    const auto bytes = static_cast<std::size_t>(want.view.bytes());
    const bool equal = bytes == 0 || std::memcmp(got.data, want.view.data, bytes) == 0;
    RC_ASSERT(equal);
  }
}

// A file with one changed byte, or cut anywhere, opens or is refused by a typed error.
RC_GTEST_PROP(SafetensorsProperty, DamageNeverEscapes,
              (std::size_t at, std::uint8_t value, std::size_t length)) {
  const TempDir dir;
  const std::uint8_t bytes[24] = {};
  write_safetensors(dir.file("f"),
                    std::vector<NamedTensor>{tensor("one", DType::kF32, {2, 2}, bytes),
                                             tensor("two", DType::kE4M3, {8}, bytes)});
  std::string damaged = read_file(dir.file("f"));
  damaged[at % damaged.size()] = static_cast<char>(value);
  damaged.resize(damaged.size() - length % damaged.size());
  try {
    SafetensorsFile{dir.write("g", damaged)};
  } catch (const Error& e) {
    RC_ASSERT(e.kind() == ErrorKind::kInvalidArgument);
  }
}

}  // namespace
}  // namespace penstock
