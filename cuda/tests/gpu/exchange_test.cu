// SPDX-License-Identifier: Apache-2.0
// Exchange and psum on rig B, bit by bit against the host. Usage: exchange_test
// check|stress|faults|negative|far|small [count]. One line a case; exit code 1 if any fails.
#include "controls.cuh"
#include "exchange_fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses {
namespace testing {
namespace {

using Bytes = std::vector<char>;

void Upload(const Buffer& b, const Bytes& host) {
  CK(cudaMemcpy(b.get(), host.data(), host.size(), cudaMemcpyHostToDevice));
}
Bytes Download(const Buffer& b) {
  Bytes host(static_cast<size_t>(b.bytes()));
  CK(cudaMemcpy(host.data(), b.get(), host.size(), cudaMemcpyDeviceToHost));
  return host;
}

float LoadHost(const char* p, SumType type) {
  if (type == SumType::kF32) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  if (type == SumType::kF16) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}
void StoreHost(char* p, SumType type, float v) {
  if (type == SumType::kF32) {
    std::memcpy(p, &v, 4);
  } else if (type == SumType::kF16) {
    const __half h = __float2half(v);
    std::memcpy(p, &h, 2);
  } else {
    const __nv_bfloat16 h = __float2bfloat16(v);
    std::memcpy(p, &h, 2);
  }
}

struct Case {
  Shape shape;
  int element_bytes;
  bool gather;
  SumType sum = SumType::kNone;
  int misalign = 0;  // bytes by which all pointers are off
};

class ExchangeWorld {
 public:
  explicit ExchangeWorld(const Case& c)
      : c_(c), ex_(c.shape.Exchange()), heaps_(c.shape, SlotBytes(Probe(c))) {
    std::mt19937 random(7);
    for (int set = 0; set < 2; ++set) {
      in_host_.emplace_back(c.shape.ranks);
      for (int r = 0; r < c.shape.ranks; ++r) {
        for (size_t seg = 0; seg < c.shape.heads.size(); ++seg) {
          Bytes host(static_cast<size_t>(InBytes(seg)));
          if (c.sum == SumType::kNone) {
            for (char& v : host) v = static_cast<char>(random());
          } else {
            for (size_t i = 0; i < host.size(); i += c.element_bytes) {
              StoreHost(&host[i], c.sum, static_cast<float>(random() % 4096) / 1024 - 2);
            }
          }
          in_host_[set][r].push_back(host);
        }
      }
    }
    for (int r = 0; r < c.shape.ranks; ++r) {
      in_.emplace_back();
      out_.emplace_back();
      for (size_t seg = 0; seg < c.shape.heads.size(); ++seg) {
        in_[r].emplace_back(2 * (InBytes(seg) + 16));
        out_[r].emplace_back(OutBytes(seg) + 16);
        for (int set = 0; set < 2; ++set) {
          CK(cudaMemcpy(In(set, r, seg), in_host_[set][r][seg].data(), InBytes(seg),
                        cudaMemcpyHostToDevice));
        }
      }
    }
  }
  static ExchangeCall Probe(const Case& c) {
    ExchangeCall call;
    call.exchange = c.shape.Exchange();
    call.batch = c.shape.batch;
    call.element_bytes = c.element_bytes;
    return call;
  }
  int64_t SequenceBytes(size_t seg) const {
    return c_.shape.rows() * ex_.heads[seg] * ex_.head_dim * c_.element_bytes;
  }
  int64_t HeadBytes(size_t seg) const {
    return c_.shape.rows() * ex_.num_ranks * ex_.segment_columns(seg) * c_.element_bytes;
  }
  int64_t InBytes(size_t seg) const { return c_.gather ? HeadBytes(seg) : SequenceBytes(seg); }
  int64_t OutBytes(size_t seg) const { return c_.gather ? SequenceBytes(seg) : HeadBytes(seg); }
  char* In(int set, int r, size_t seg) const {
    return in_[r][seg].get() + set * (InBytes(seg) + 15) / 16 * 16 + c_.misalign;
  }
  char* Out(int r, size_t seg) const { return out_[r][seg].get() + c_.misalign; }

  std::vector<ExchangeCall> Calls(int set) const {
    std::vector<ExchangeCall> calls(c_.shape.ranks, Probe(c_));
    for (int r = 0; r < c_.shape.ranks; ++r) {
      calls[r].info =
          heaps_.Info(r, c_.gather ? Operator::kGather : Operator::kScatter, 5, 5000000000ull);
      calls[r].gather = c_.gather;
      calls[r].sum_replicas = c_.sum;
      for (size_t seg = 0; seg < c_.shape.heads.size(); ++seg) {
        calls[r].in[seg] = In(set, r, seg);
        calls[r].out[seg] = Out(r, seg);
      }
    }
    return calls;
  }
  void Poison() const {
    heaps_.PoisonSlots(nullptr);
    for (const auto& rank : out_) {
      for (const Buffer& b : rank) b.Poison();
    }
  }
  int64_t Wrong(int set) const {
    const int64_t H = ex_.head_dim * c_.element_bytes;
    int64_t wrong = 0;
    for (int r = 0; r < c_.shape.ranks; ++r) {
      for (size_t seg = 0; seg < c_.shape.heads.size(); ++seg) {
        const Bytes got = Download(out_[r][seg]);
        const int64_t M = ex_.heads[seg], L = ex_.local_heads(seg), T = ex_.local_tokens;
        const int64_t S = T * ex_.num_ranks, R = ex_.replicas(seg);
        Bytes sum(static_cast<size_t>(H));
        for (int64_t b = 0; b < c_.shape.batch; ++b) {
          for (int64_t row = 0; row < (c_.gather ? T : S); ++row) {
            for (int64_t head = 0; head < (c_.gather ? M : L); ++head) {
              const char* want;
              if (c_.gather) {
                const int64_t owner = R > 1 ? head * R : head / L;
                const int64_t at = (b * S + ex_.tokens().GlobalRow(r, row)) * L + head % L;
                want = &in_host_[set][owner][seg][at * H];
                if (R > 1 && c_.sum != SumType::kNone) {
                  for (int64_t e = 0; e < H; e += c_.element_bytes) {
                    float total = 0;
                    for (int64_t k = 0; k < R; ++k) {
                      total += LoadHost(&in_host_[set][owner + k][seg][at * H + e], c_.sum);
                    }
                    StoreHost(&sum[e], c_.sum, total);
                  }
                  want = sum.data();
                }
              } else {
                const RowOwner from = ex_.tokens().Owner(row);
                const int64_t global_head = ex_.first_head(seg, r) + head;
                want = &in_host_[set][from.rank][seg]
                                [((b * T + from.local_row) * M + global_head) * H];
              }
              const int64_t at =
                  c_.gather ? ((b * T + row) * M + head) * H : ((b * S + row) * L + head) * H;
              wrong += std::memcmp(&got[at + c_.misalign], want, H) != 0;
            }
          }
        }
      }
    }
    return wrong;
  }

 private:
  Case c_;
  HeadExchange ex_;
  Heaps heaps_;
  std::vector<std::vector<std::vector<Bytes>>> in_host_;
  std::vector<std::vector<Buffer>> in_, out_;
};

void Check(const Case& c, int launches) {
  const auto entry = TestExchangeEntry();
  ExchangeWorld world(c);
  int64_t wrong = 0;
  std::mt19937 random(3);
  LaunchPlan plan = PlanFor(c.shape.ranks, false);
  for (int i = 0; i < launches; ++i) {
    auto calls = world.Calls(i % 2);
    for (auto& call : calls) {
      if (launches > 3) call.hooks.start_delay_ns = random() % 2 * (random() % 50000);
    }
    world.Poison();
    WorldLaunch<ExchangeCall>(entry, calls, plan).Run(nullptr);
    CK(cudaDeviceSynchronize());
    wrong += world.Wrong(i % 2);
  }
  Line(wrong == 0, c.gather ? "gather " : "scatter",
       std::string() + " " + std::to_string(c.element_bytes) + " bytes" +
           (c.misalign != 0 ? " misaligned" : "") + (c.sum != SumType::kNone ? " sum" : "") + " " +
           c.shape.Text() + ": wrong heads " + std::to_string(wrong));
}

void CheckPsum(int ranks, SumType type, int64_t count, int launches) {
  const int size = type == SumType::kF32 ? 4 : 2;
  PsumCall probe;
  probe.type = type;
  probe.count = count;
  probe.info.layout.num_ranks = ranks;
  Heaps heaps(ranks, SlotBytes(probe));
  std::mt19937 random(11);
  std::vector<Bytes> host;
  std::vector<Buffer> in, out;
  for (int r = 0; r < ranks; ++r) {
    host.emplace_back(count * size);
    for (int64_t i = 0; i < count; ++i) {
      StoreHost(&host[r][i * size], type, static_cast<float>(random()) / 4e9f - 0.5f);
    }
    in.emplace_back(count * size);
    out.emplace_back(count * size);
    Upload(in[r], host[r]);
  }
  std::vector<PsumCall> calls(ranks, probe);
  for (int r = 0; r < ranks; ++r) {
    calls[r].info = heaps.Info(r, Operator::kNone, 6, 5000000000ull);
    calls[r].in = in[r].get();
    calls[r].out = out[r].get();
  }
  WorldLaunch<PsumCall> launch(TestPsumEntry(), calls, PlanFor(ranks, false));
  int64_t wrong = 0;
  for (int i = 0; i < launches; ++i) {
    heaps.PoisonSlots(nullptr);
    for (const Buffer& b : out) b.Poison();
    launch.Run(nullptr);
    CK(cudaDeviceSynchronize());
    for (int r = 0; r < ranks; ++r) {
      const Bytes got = Download(out[r]);
      for (int64_t j = 0; j < count; ++j) {
        float sum = 0;
        for (int k = 0; k < ranks; ++k) sum += LoadHost(&host[k][j * size], type);
        char want[4];
        StoreHost(want, type, sum);
        wrong += std::memcmp(want, &got[j * size], size) != 0;
      }
    }
  }
  Line(wrong == 0, "psum",
       "P" + std::to_string(ranks) + " type " + std::to_string(static_cast<int>(type)) + " count " +
           std::to_string(count) + ": wrong " + std::to_string(wrong));
}

Shape Make(int p, int b, int t, std::vector<int> heads, int h, bool zigzag) {
  Shape s;
  s.ranks = p, s.batch = b, s.tokens = t, s.heads = std::move(heads), s.head_dim = h;
  s.zigzag = zigzag, s.model = 0;
  return s;
}

// Rows that bulk copies can move, or not.
Shape ControlShape(bool bulk) {
  Shape s = StressShape(4, true, false);
  if (!bulk) s.tokens = 255, s.heads = {12}, s.head_dim = 63, s.model = 255;
  return s;
}

std::vector<Variant> ControlVariants(bool bulk) {
  Shape big = ControlShape(bulk);
  big.tokens *= 8;
  return Variants(ControlShape(bulk), big);
}

void Negative(int launches) {
  const auto gather = TestExchangeEntry();
  const auto psum = TestPsumEntry();
  NegativeControls<ExchangeFixture>(gather, "gather bulk", ControlVariants(true), launches,
                                    kRingControls, kBulkWriteControls, kBulkReadControls,
                                    kHandOffControls);
  NegativeControls<ExchangeFixture>(gather, "gather plain", ControlVariants(false), launches,
                                    kPlainReadControls, kHandOffControls);
  NegativeControls<PsumFixture>(psum, "psum bulk", ControlVariants(true), launches,
                                kShortRingControls, kBulkWriteControls, kL2ReadControls,
                                kHandOffControls);
  NegativeControls<PsumFixture>(psum, "psum plain", ControlVariants(false), launches,
                                kPlainReadControls, kHandOffControls);
}

void Far(int launches) {
  for (bool bulk : {true, false}) {
    const Shape big = ControlVariants(bulk).back().shape;
    FarControls<ExchangeFixture>(TestExchangeEntry(), bulk ? "gather bulk" : "gather plain", big,
                                 launches, bulk);
    FarControls<PsumFixture>(TestPsumEntry(), bulk ? "psum bulk" : "psum plain", big, launches,
                             bulk);
  }
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  const int count = argc > 2 ? std::atoi(argv[2]) : 20;
  if (what == "check") {
    for (bool gather : {false, true}) {
      for (int p : {2, 4, 8}) {
        Check({Make(p, 1, 128, {8, 8, 8}, 64, false), 2, gather}, 3);
        Check({Make(p, 2, 70, {16, 8}, 80, true), 2, gather}, 3);
        Check({Make(p, 3, 6, {8}, 8, true), 4, gather}, 3);
        Check({Make(p, 2, 33, {8, 8}, 7, false), 1, gather}, 3);  // rows of odd bytes
        Check({Make(p, 1, 17, {8}, 5, false), 2, gather}, 2);
        Check({Make(p, 1, 40, {8}, 64, false), 8, gather, SumType::kNone, 8}, 2);
        Check({Make(p, 1, 1, {8}, 128, false), 2, gather}, 2);
        Check({Make(p, 1, 64, {8, 1, 2}, 64, false), 2, gather}, 2);  // replicas
      }
    }
    for (SumType type : {SumType::kF32, SumType::kBf16, SumType::kF16}) {
      const int size = type == SumType::kF32 ? 4 : 2;
      Check({Make(8, 2, 50, {8, 2, 2}, 64, true), size, true, type}, 3);
      Check({Make(4, 1, 33, {1}, 24, false), size, true, type}, 3);
      Check({Make(4, 1, 34, {8, 2}, 5, true), size, true, type}, 3);  // no whole vectors
      for (int p : {2, 8}) {
        CheckPsum(p, type, 1, 2);
        CheckPsum(p, type, 1003, 2);
        CheckPsum(p, type, 300000, 2);
      }
    }
  } else if (what == "faults") {
    Faults<ExchangeFixture>(ControlShape(true), TestExchangeEntry(), "gather");
    Faults<PsumFixture>(ControlShape(true), TestPsumEntry(), "psum");
  } else if (what == "negative") {
    Negative(argc > 2 ? count : 30);
  } else if (what == "far") {
    Far(argc > 2 ? count : 30);
  } else if (what == "small") {  // under compute-sanitizer
    Check({Make(4, 2, 22, {8, 2}, 16, true), 2, true, SumType::kBf16}, 2);
    Check({Make(2, 2, 22, {8, 2}, 16, true), 2, false}, 2);
    Check({Make(2, 2, 11, {8, 2}, 3, false), 1, false}, 2);
    CheckPsum(4, SumType::kF32, 1000, 2);
  } else {
    for (bool gather : {false, true}) {
      for (int p : {2, 8}) Check({Make(p, 2, 70, {16, 8}, 80, true), 2, gather}, count);
    }
  }
  std::printf("exchange_test %s: %d failed\n", what.c_str(), g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace testing
}  // namespace jax_ulysses

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
