// What an engine in C++ needs to read a job and its checkpoint and to write taps. Copy this file; it needs the standard
// library alone.
//
// job.json and config.json are JSON; checkpoint, inputs and taps are safetensors files: eight bytes of header length, a
// JSON header, raw little-endian values.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;
using Row = std::vector<double>;
using Rows = std::vector<Row>;

[[noreturn]] inline void fail(const std::string &what) {
    std::fprintf(stderr, "engine: %s\n", what.c_str());
    std::exit(1);
}

// ---- JSON, as much of it as job.json, config.json and safetensors headers need ------------------------------------

struct Json {
    double number = 0;
    std::string text;
    std::vector<Json> items;
    std::map<std::string, Json> fields;

    const Json &operator[](const std::string &key) const {
        auto found = fields.find(key);
        if (found == fields.end()) fail("key " + key + " is missing");
        return found->second;
    }
    int whole() const { return static_cast<int>(number); }
};

struct Parser {
    const char *at;

    char next() {
        while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r' || *at == ',' || *at == ':') ++at;
        return *at;
    }
    std::string string() {
        std::string out;
        for (++at; *at != '"'; ++at) {
            if (*at == '\\') ++at;
            out += *at;
        }
        ++at;
        return out;
    }
    Json value() {
        Json out;
        switch (next()) {
        case '{':
            for (++at; next() != '}';) {
                std::string key = string();
                out.fields[key] = value();
            }
            ++at;
            break;
        case '[':
            for (++at; next() != ']';) out.items.push_back(value());
            ++at;
            break;
        case '"': out.text = string(); break;
        case 't': out.number = 1, at += 4; break;
        case 'f': at += 5; break;
        case 'n': at += 4; break;
        default: {
            char *end;
            out.number = std::strtod(at, &end);
            if (end == at) fail("no valid JSON");
            at = end;
        }
        }
        return out;
    }
};

inline std::string read_text(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail(path.string() + ": cannot be read");
    return {std::istreambuf_iterator<char>(file), {}};
}

inline Json read_json(const fs::path &path) { return Parser{read_text(path).c_str()}.value(); }

// ---- safetensors ----------------------------------------------------------------------------------------------------

struct Tensor {
    std::string dtype;
    std::vector<size_t> shape;
    std::string bytes;

    size_t size() const {
        size_t count = 1;
        for (size_t length : shape) count *= length;
        return count;
    }
    template <class T> std::vector<T> as() const {
        std::vector<T> out(bytes.size() / sizeof(T));
        std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
        return out;
    }
};

struct Tensors {
    std::string raw;
    Json header;

    explicit Tensors(const fs::path &path) : raw(read_text(path)) {
        header = Parser{raw.substr(8, length()).c_str()}.value();
    }
    uint64_t length() const {
        uint64_t length;
        std::memcpy(&length, raw.data(), 8);
        return length;
    }
    bool has(const std::string &name) const { return header.fields.count(name); }
    Tensor get(const std::string &name) const {
        const Json &entry = header[name];
        Tensor out{entry["dtype"].text, {}, {}};
        for (const Json &item : entry["shape"].items) out.shape.push_back(item.whole());
        auto &offsets = entry["data_offsets"].items;
        auto start = static_cast<size_t>(offsets[0].number), stop = static_cast<size_t>(offsets[1].number);
        out.bytes = raw.substr(8 + length() + start, stop - start);
        return out;
    }
    std::vector<int64_t> whole(const std::string &name) const {
        Tensor tensor = get(name);
        if (tensor.dtype == "I64") return tensor.as<int64_t>();
        auto narrow = tensor.as<int32_t>();
        return {narrow.begin(), narrow.end()};
    }
    // Values in rows of their last axis.
    Rows rows(const std::string &name) const {
        Tensor tensor = get(name);
        size_t width = tensor.shape.empty() ? 1 : tensor.shape.back();
        Row flat;
        if (tensor.dtype == "F32") {
            auto values = tensor.as<float>();
            flat.assign(values.begin(), values.end());
        } else if (tensor.dtype == "BF16") {
            for (uint32_t bits : tensor.as<uint16_t>()) {
                float value;
                bits <<= 16;
                std::memcpy(&value, &bits, 4);
                flat.push_back(value);
            }
        } else {
            fail(name + " is " + tensor.dtype + ", expected F32 or BF16");
        }
        Rows out;
        for (size_t start = 0; start < flat.size(); start += width)
            out.emplace_back(flat.begin() + start, flat.begin() + start + width);
        return out;
    }
    Row flat(const std::string &name) const {
        Row out;
        for (const Row &row : rows(name)) out.insert(out.end(), row.begin(), row.end());
        return out;
    }
};

// Taps of one layer on their way to a file.
struct Taps {
    std::string header, data;

    void bytes(const std::string &name, const char *dtype, size_t lines, std::vector<size_t> shape, const void *from,
               size_t size) {
        std::ostringstream entry;
        entry << (header.empty() ? "{" : ", ") << '"' << name << "\": {\"dtype\": \"" << dtype << "\", \"shape\": ["
              << lines;
        for (size_t length : shape) entry << ", " << length;
        entry << "], \"data_offsets\": [" << data.size() << ", " << data.size() + size << "]}";
        header += entry.str();
        data.append(static_cast<const char *>(from), size);
    }
    // Rows (one line a judged row) of the given shape after axis 0.
    void put(const std::string &name, const Rows &rows, std::vector<size_t> shape) {
        std::vector<float> flat;
        for (const Row &row : rows) flat.insert(flat.end(), row.begin(), row.end());
        bytes(name, "F32", rows.size(), shape, flat.data(), flat.size() * sizeof(float));
    }
    void put(const std::string &name, const std::vector<std::vector<int32_t>> &ids) {
        std::vector<int32_t> flat;
        for (auto &row : ids) flat.insert(flat.end(), row.begin(), row.end());
        bytes(name, "I32", ids.size(), {ids[0].size()}, flat.data(), flat.size() * sizeof(int32_t));
    }
    void write(const fs::path &path) {
        fs::create_directories(path.parent_path());
        header += "}";
        header.append((8 - header.size() % 8) % 8, ' ');
        uint64_t length = header.size();
        std::ofstream file(path, std::ios::binary);
        file.write(reinterpret_cast<char *>(&length), 8);
        file << header << data;
        if (!file.flush()) fail(path.string() + ": cannot be written");
    }
};

// Say that all taps are written, and on what they were made.
inline void finish(const Json &job, const fs::path &out, const std::string &device) {
    fs::create_directories(out);
    std::ofstream(out / "manifest.json") << "{\"schema\": 1, \"job\": \"" << job["id"].text << "\", \"device\": \""
                                         << device << "\"}\n";
}
