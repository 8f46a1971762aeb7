// A window-only layer of DeepSeek-V4 as an engine: mHC, attention and experts in compiled loops, standard library only.
// Build: c++ -O2 -std=c++17 -o window_layer window_layer.cpp      Run by the audit: window_layer [--fault NAME] JOB
//
// It answers isolated mode for the window-only layers that a job asks for, on the dequantised weights, in double. Each
// op reads the reference's values, so that a difference is its own.
#include "../tap_writer.hpp"

#include <algorithm>
#include <cmath>

// ---- weights, dequantised -------------------------------------------------------------------------------------

double e4m3(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double size = exponent ? std::ldexp(1 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa / 8.0, -6);
    return code & 128 ? -size : size;
}

struct Checkpoint {
    std::vector<Tensors> files;

    explicit Checkpoint(const fs::path &folder) {
        std::vector<fs::path> paths;
        for (auto &entry : fs::directory_iterator(folder))
            if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
        std::sort(paths.begin(), paths.end());
        for (auto &path : paths) files.emplace_back(path);
    }
    const Tensors *find(const std::string &name) const {
        for (auto &file : files)
            if (file.has(name)) return &file;
        return nullptr;
    }
    const Tensors &file(const std::string &name) const {
        auto found = find(name);
        if (!found) fail(name + " is in no file of the checkpoint");
        return *found;
    }
    // A matrix in rows of its inputs: BF16 and FP32 as they are, NVFP4 as code x block scale x scale.
    Rows matrix(const std::string &name) const {
        if (!find(name + "_scale_2")) return file(name).rows(name);
        static const double E2M1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        Tensor codes = file(name).get(name), blocks = file(name).get(name + "_scale");
        Row scale = file(name).flat(name + "_scale_2"); // one a matrix, or one an expert
        size_t width = codes.shape.back() * 2, count = codes.size() / codes.shape.back();
        Rows out(count, Row(width));
        for (size_t n = 0; n < count; ++n)
            for (size_t k = 0; k < width; ++k) {
                auto code = static_cast<uint8_t>(codes.bytes[n * width / 2 + k / 2]) >> (k % 2 ? 4 : 0) & 15;
                double value = (code & 8 ? -1 : 1) * E2M1[code & 7];
                auto block = static_cast<uint8_t>(blocks.bytes[(n * width + k) / 16]);
                out[n][k] = value * e4m3(block) * scale[n * scale.size() / count];
            }
        return out;
    }
    Row vector(const std::string &name) const { return file(name).flat(name); }
};

// ---- the layer ------------------------------------------------------------------------------------------------

double dot(const double *x, const double *y, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += x[i] * y[i];
    return sum;
}

Row times(const Rows &matrix, const double *x) {
    Row out;
    for (const Row &row : matrix) out.push_back(dot(row.data(), x, row.size()));
    return out;
}

void norm(double *x, size_t count, double eps, const Row *weight) {
    double scale = 1 / std::sqrt(dot(x, x, count) / count + eps);
    for (size_t i = 0; i < count; ++i) x[i] *= scale * (weight ? (*weight)[i] : 1);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Layer {
    const Json &config;
    const Checkpoint &checkpoint;
    std::string prefix, fault;
    size_t hidden, heads, dim, rope, streams, experts, chosen, width, window, groups;
    double eps, hc_eps, limit;

    Layer(const Json &config, const Checkpoint &checkpoint, int layer, const std::string &fault)
        : config(config), checkpoint(checkpoint), prefix("model.layers." + std::to_string(layer) + "."), fault(fault),
          hidden(size("hidden_size")), heads(size("num_attention_heads")), dim(size("head_dim")),
          rope(size("qk_rope_head_dim")), streams(size("hc_mult")), experts(size("n_routed_experts")),
          chosen(size("num_experts_per_tok")), width(size("moe_intermediate_size")), window(size("sliding_window")),
          groups(size("o_groups")), eps(config["rms_norm_eps"].number), hc_eps(config["hc_eps"].number),
          limit(config["swiglu_limit"].number) {}

    size_t size(const char *key) const { return config[key].whole(); }
    Rows matrix(const std::string &name) const { return checkpoint.matrix(prefix + name + ".weight"); }
    Row vector(const std::string &name) const { return checkpoint.vector(prefix + name); }

    // Turn the last dims of one head by its position: neighbours are a pair; frequencies and angles in FP32.
    void rotate(double *x, int64_t position, int sign) const {
        for (size_t pair = 0; pair < rope / 2; ++pair) {
            auto theta = static_cast<float>(config["rope_theta"].number);
            float frequency = 1.0f / std::pow(theta, 2.0f * pair / static_cast<float>(rope));
            float angle = static_cast<float>(position) * frequency;
            double cosine = static_cast<float>(std::cos(static_cast<double>(angle)));
            double sine = sign * static_cast<double>(static_cast<float>(std::sin(static_cast<double>(angle))));
            double *tail = x + dim - rope;
            double &a = fault == "rope" ? tail[pair] : tail[2 * pair];
            double &b = fault == "rope" ? tail[pair + rope / 2] : tail[2 * pair + 1];
            double first = a * cosine - b * sine;
            b = a * sine + b * cosine;
            a = first;
        }
    }

    // mHC before a block: mixing weights of each row's streams, and the block's normed input.
    void before(Taps &taps, const std::string &site, const std::string &name, const std::string &norm_name,
                const Rows &all) const {
        size_t n = streams;
        Rows fn = checkpoint.matrix(prefix + name + ".fn"), pre, post, comb, in;
        Row base = vector(name + ".base"), scale = vector(name + ".scale"), weight = vector(norm_name + ".weight");
        for (const Row &x : all) {
            Row flat = x;
            norm(flat.data(), flat.size(), eps, nullptr);
            Row mix = times(fn, flat.data()), row_pre(n), row_post(n), c(n * n), y(hidden);
            for (size_t i = 0; i < n; ++i) {
                row_pre[i] = static_cast<float>(sigmoid(mix[i] * scale[0] + base[i]) + hc_eps);
                row_post[i] = 2 * sigmoid(mix[n + i] * scale[1] + base[n + i]);
            }
            for (size_t i = 0; i < n; ++i) { // softmax of each row
                double top = -1e300, sum = 0;
                for (size_t j = 0; j < n; ++j) {
                    c[i * n + j] = mix[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
                    top = std::max(top, c[i * n + j]);
                }
                for (size_t j = 0; j < n; ++j) sum += c[i * n + j] = std::exp(c[i * n + j] - top);
                for (size_t j = 0; j < n; ++j) c[i * n + j] = c[i * n + j] / sum + hc_eps;
            }
            size_t steps = 2 * size("hc_sinkhorn_iters") - 1; // columns, then rows, columns, ...
            for (size_t step = 0; step < steps; ++step) {
                size_t along = step % 2 ? 1 : n, across = step % 2 ? n : 1;
                for (size_t i = 0; i < n; ++i) {
                    double sum = hc_eps;
                    for (size_t j = 0; j < n; ++j) sum += c[i * across + j * along];
                    for (size_t j = 0; j < n; ++j) c[i * across + j * along] /= sum;
                }
            }
            for (size_t j = 0; j < n; ++j)
                for (size_t d = 0; d < hidden; ++d) y[d] += row_pre[j] * x[j * hidden + d];
            norm(y.data(), hidden, eps, &weight);
            pre.push_back(row_pre), post.push_back(row_post), comb.push_back(c), in.push_back(y);
        }
        taps.put(site + "_pre", pre, {n});
        taps.put(site + "_post", post, {n});
        taps.put(site + "_comb", comb, {n, n});
        taps.put(site + "_in", in, {hidden});
    }

    // mHC after a block: its output goes back to the streams, which are mixed over comb's first index.
    Rows after(const Rows &all, const Rows &y, const Rows &post, const Rows &comb) const {
        Rows out(all.size(), Row(streams * hidden));
        for (size_t t = 0; t < all.size(); ++t)
            for (size_t k = 0; k < streams; ++k)
                for (size_t d = 0; d < hidden; ++d) {
                    double sum = post[t][k] * y[t][d];
                    for (size_t j = 0; j < streams; ++j) sum += comb[t][j * streams + k] * all[t][j * hidden + d];
                    out[t][k * hidden + d] = sum;
                }
        return out;
    }

    void attention(Taps &taps, const Tensors &in, const std::vector<int64_t> &positions) const {
        Rows x = in.rows("attn_in"), qr, q, attn_out, lse, attn_proj;
        Rows q_a = matrix("self_attn.q_a_proj"), q_b = matrix("self_attn.q_b_proj");
        Row q_a_norm = vector("self_attn.q_a_norm.weight");
        for (const Row &row : x) {
            qr.push_back(times(q_a, row.data()));
            norm(qr.back().data(), qr.back().size(), eps, &q_a_norm);
        }
        Rows low = in.rows("qr");
        for (size_t t = 0; t < low.size(); ++t) {
            q.push_back(times(q_b, low[t].data()));
            for (size_t h = 0; h < heads; ++h) {
                norm(&q.back()[h * dim], dim, eps, nullptr);
                rotate(&q.back()[h * dim], positions[t], 1);
            }
        }
        Rows kv, keys = in.rows("history.kv"), kv_proj = matrix("self_attn.kv_proj");
        Row kv_norm = vector("self_attn.kv_norm.weight"), sinks = vector("self_attn.sinks");
        for (size_t t = 0; t < x.size(); ++t) {
            kv.push_back(times(kv_proj, x[t].data()));
            norm(kv.back().data(), dim, eps, &kv_norm);
            rotate(kv.back().data(), positions[t], 1);
        }
        Row queries = in.flat("q");
        double scale = 1 / std::sqrt(double(dim));
        for (size_t t = 0; t < x.size(); ++t) {
            size_t last = positions[t], first = last + 1 > window ? last + 1 - window : 0;
            Row out(heads * dim), row_lse;
            for (size_t h = 0; h < heads; ++h) {
                Row logits;
                for (size_t s = first; s <= last; ++s)
                    logits.push_back(dot(&queries[(t * heads + h) * dim], keys[s].data(), dim) * scale);
                double top = *std::max_element(logits.begin(), logits.end()), sum = 0;
                for (double &logit : logits) sum += logit = std::exp(logit - top);
                double total = sum + (fault == "sink" ? 0 : std::exp(sinks[h] - top));
                for (size_t s = first; s <= last; ++s)
                    for (size_t d = 0; d < dim; ++d) out[h * dim + d] += logits[s - first] / total * keys[s][d];
                rotate(&out[h * dim], positions[t], -1);
                row_lse.push_back(top + std::log(sum));
            }
            attn_out.push_back(out), lse.push_back(row_lse);
        }
        Rows o_a = matrix("self_attn.o_a_proj"), o_b = matrix("self_attn.o_b_proj");
        size_t rank = o_a.size() / groups, part = heads * dim / groups;
        Row heads_out = in.flat("attn_out");
        for (size_t t = 0; t < x.size(); ++t) {
            Row low_rank;
            for (size_t n = 0; n < o_a.size(); ++n)
                low_rank.push_back(dot(o_a[n].data(), &heads_out[t * heads * dim + n / rank * part], part));
            attn_proj.push_back(times(o_b, low_rank.data()));
        }
        taps.put("qr", qr, {qr[0].size()});
        taps.put("q", q, {heads, dim});
        taps.put("kv", kv, {dim});
        taps.put("lse", lse, {heads});
        taps.put("attn_out", attn_out, {heads, dim});
        taps.put("attn_proj", attn_proj, {hidden});
    }

    Row expert(const Row &x, const double *const *gate, const double *const *up, const Rows &down, size_t first) const {
        Row inside(width);
        for (size_t f = 0; f < width; ++f) {
            double g = std::min(dot(gate[f], x.data(), hidden), limit);
            double u = std::clamp(dot(up[f], x.data(), hidden), -limit, limit);
            inside[f] = g * sigmoid(g) * u;
        }
        Row out(hidden);
        for (size_t d = 0; d < hidden; ++d) out[d] = dot(down[first + d].data(), inside.data(), width);
        return out;
    }
    static std::vector<const double *> pointers(const Rows &rows, size_t first, size_t count) {
        std::vector<const double *> out;
        for (size_t i = 0; i < count; ++i) out.push_back(rows[first + i].data());
        return out;
    }

    void moe(Taps &taps, const Tensors &in) const {
        Rows x = in.rows("moe_in"), scores, weights, routed, shared, sum, router = matrix("mlp.gate");
        std::vector<std::vector<int32_t>> ids;
        auto tokens = in.whole("tokens"), given = in.whole("expert_ids");
        bool hashed = checkpoint.find(prefix + "mlp.gate.tid2eid");
        std::vector<int64_t> table;
        if (hashed) table = checkpoint.file(prefix + "mlp.gate.tid2eid").whole(prefix + "mlp.gate.tid2eid");
        Row bias = hashed ? Row(experts) : vector("mlp.gate.e_score_correction_bias");
        for (size_t t = 0; t < x.size(); ++t) {
            Row row = times(router, x[t].data());
            for (double &score : row) score = std::sqrt(std::max(score, 0.0) + std::log1p(std::exp(-std::fabs(score))));
            std::vector<int32_t> best(experts);
            for (size_t e = 0; e < experts; ++e) best[e] = e;
            std::stable_sort(best.begin(), best.end(), [&](int a, int b) {
                return float(row[a]) + float(bias[a]) > float(row[b]) + float(bias[b]);
            });
            for (size_t k = 0; hashed && k < chosen; ++k) best[k] = table[tokens[t] * chosen + k];
            best.resize(chosen);
            std::sort(best.begin(), best.end());
            scores.push_back(row), ids.push_back(best);
        }
        Rows known = in.rows("router_scores"), share = in.rows("expert_weights");
        for (size_t t = 0; t < x.size(); ++t) {
            Row row;
            double total = 0;
            for (size_t k = 0; k < chosen; ++k) total += known[t][given[t * chosen + k]];
            for (size_t k = 0; k < chosen; ++k) {
                double scaling = fault == "scaling" ? 1 : config["routed_scaling_factor"].number;
                row.push_back(known[t][given[t * chosen + k]] / (total + 1e-20) * scaling);
            }
            weights.push_back(row);
        }
        Rows gate_up = checkpoint.matrix(prefix + "mlp.experts.gate_up_proj");
        Rows down = checkpoint.matrix(prefix + "mlp.experts.down_proj");
        Rows gate = matrix("mlp.shared_experts.gate_proj"), up = matrix("mlp.shared_experts.up_proj");
        Rows shared_down = matrix("mlp.shared_experts.down_proj");
        for (size_t t = 0; t < x.size(); ++t) {
            Row out(hidden);
            for (size_t k = 0; k < chosen; ++k) {
                size_t e = given[t * chosen + k];
                auto gates = pointers(gate_up, 2 * e * width, width);
                auto ups = pointers(gate_up, (2 * e + 1) * width, width);
                Row y = expert(x[t], gates.data(), ups.data(), down, e * hidden);
                for (size_t d = 0; d < hidden; ++d) out[d] += share[t][k] * y[d];
            }
            routed.push_back(out);
            auto gates = pointers(gate, 0, width), ups = pointers(up, 0, width);
            shared.push_back(expert(x[t], gates.data(), ups.data(), shared_down, 0));
        }
        Rows a = in.rows("routed"), b = in.rows("shared");
        for (size_t t = 0; t < x.size(); ++t)
            for (size_t d = 0; d < hidden; ++d) a[t][d] += b[t][d];
        taps.put("router_scores", scores, {experts});
        taps.put("expert_ids", ids);
        taps.put("expert_weights", weights, {chosen});
        taps.put("routed", routed, {hidden});
        taps.put("shared", shared, {hidden});
        taps.put("moe_out", a, {hidden});
    }

    void run(const fs::path &inputs, const fs::path &outputs) const {
        Tensors in(inputs);
        Taps taps;
        auto joined = [&](const std::string &name, size_t size) { // rows of several axes as one row
            Row flat = in.flat(name);
            Rows out;
            for (size_t start = 0; start < flat.size(); start += size)
                out.emplace_back(flat.begin() + start, flat.begin() + start + size);
            return out;
        };
        Rows first = joined("streams_in", streams * hidden), mid = joined("streams_mid", streams * hidden);
        before(taps, "attn", "attn_hc", "input_layernorm", first);
        attention(taps, in, in.whole("rows"));
        Rows comb = joined("attn_comb", streams * streams), moe_comb = joined("moe_comb", streams * streams);
        taps.put("streams_mid", after(first, in.rows("attn_proj"), in.rows("attn_post"), comb), {streams, hidden});
        before(taps, "moe", "ffn_hc", "post_attention_layernorm", mid);
        moe(taps, in);
        taps.put("streams", after(mid, in.rows("moe_out"), in.rows("moe_post"), moe_comb), {streams, hidden});
        taps.write(outputs);
    }
};

int main(int count, char **words) {
    if (count < 2) fail("usage: window_layer [--fault sink|scaling|rope] JOB");
    std::string fault = count > 3 && !std::strcmp(words[1], "--fault") ? words[2] : "";
    fs::path folder = words[count - 1], out = folder / "out" / "rank0";
    Json job = read_json(folder / "job.json");
    fs::path model = job["checkpoint"].text;
    Json config = read_json(model / "config.json");
    Checkpoint checkpoint(model);
    for (const Json &mode : job["modes"].items) {
        if (mode.text != "isolated") continue;
        for (const Json &prompt : job["prompts"].items)
            for (const Json &layer : job["layers"].items) {
                if (!layer.text.empty() || config["compress_ratios"].items[layer.whole()].whole()) continue;
                fs::path file = fs::path(prompt["id"].text) / (std::to_string(layer.whole()) + ".safetensors");
                Layer(config, checkpoint, layer.whole(), fault).run(folder / "in" / file, out / "isolated" / file);
                std::fprintf(stderr, "isolated: %s, layer %d\n", prompt["id"].text.c_str(), layer.whole());
            }
    }
    finish(job, out, "cpu, double, compiled loops");
    return 0;
}
