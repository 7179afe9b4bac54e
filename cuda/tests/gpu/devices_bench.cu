// SPDX-License-Identifier: Apache-2.0
// Fused against pure and separate on real links: one rank a device, one process, peer access. First
// checks values, then measures; one JSON line a variant. `all` adds other numbers of CTAs that
// communicate, and of rows that all CTAs push. Usage: devices_bench [rounds] [all]
#include <cstring>

#include "bench_util.cuh"
#include "fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses {
KernelEntry<ExchangeCall> TestExchangeEntry();

namespace testing {
namespace {

struct Devices {
  explicit Devices(int count) : ranks(count) {
    for (int r = 0; r < ranks; ++r) {
      CK(cudaSetDevice(r));
      for (int q = 0; q < ranks; ++q) {
        if (q != r) CK(cudaDeviceEnablePeerAccess(q, 0));
      }
      streams.emplace_back();
      CK(cudaStreamCreateWithFlags(&streams.back(), cudaStreamNonBlocking));
      begin.emplace_back();
      end.emplace_back();
      CK(cudaEventCreate(&begin.back()));
      CK(cudaEventCreate(&end.back()));
      words.emplace_back(4096);
      CK(cudaMemset(words.back().get(), 0, 4096));
      table.heap[r] = words.back().get();
    }
    SyncDevices();
  }
  // Microseconds of `run(rank, stream)`, the slowest rank's.
  float Time(const std::function<void(int, cudaStream_t)>& run) {
    ++value;
    for (int r = 0; r < ranks; ++r) {
      CK(cudaSetDevice(r));
      Rendezvous<<<1, 32, 0, streams[r]>>>(table, r, ranks, value);
      CK(cudaEventRecord(begin[r], streams[r]));
      run(r, streams[r]);
      CK(cudaEventRecord(end[r], streams[r]));
    }
    float worst = 0;
    for (int r = 0; r < ranks; ++r) {
      CK(cudaSetDevice(r));
      CK(cudaStreamSynchronize(streams[r]));
      float ms;
      CK(cudaEventElapsedTime(&ms, begin[r], end[r]));
      worst = std::max(worst, ms * 1000);
    }
    UseRank(0);
    return worst;
  }

  int ranks;
  std::vector<cudaStream_t> streams;
  std::vector<cudaEvent_t> begin, end;
  std::vector<Buffer> words;
  PeerTable table;
  uint32_t value = 0;
};

class SeparateExchange {
 public:
  SeparateExchange(const Shape& shape, bool gather) : heaps_(shape.ranks, SlotBytes(Probe(shape))) {
    const HeadExchange ex = shape.Exchange();
    std::vector<ExchangeCall> calls(static_cast<size_t>(shape.ranks), Probe(shape));
    for (int r = 0; r < shape.ranks; ++r) {
      UseRank(r);
      ExchangeCall& call = calls[static_cast<size_t>(r)];
      call.info = heaps_.Info(r, gather ? Operator::kGather : Operator::kScatter, 9, 5000000000ull);
      call.gather = gather;
      for (size_t seg = 0; seg < shape.heads.size(); ++seg) {
        const int64_t bytes = shape.rows() * ex.heads[seg] * ex.head_dim * 2;
        buffers_.emplace_back(bytes);
        call.in[seg] = buffers_.back().get();
        buffers_.emplace_back(bytes);
        call.out[seg] = buffers_.back().get();
      }
    }
    UseRank(0);
    LaunchPlan plan;
    plan.ctas = plan.comm_ctas = NumSms();
    launch_.emplace_back(TestExchangeEntry(), calls, plan);
  }
  void Run(int rank, cudaStream_t stream) const { launch_[0].Run(rank, stream); }
  // Half of a rank's input to the next rank's output.
  void Copy(int rank, cudaStream_t stream) const {
    const size_t ranks = buffers_.size() / 2;
    const size_t next = (static_cast<size_t>(rank) + 1) % ranks;
    const Buffer& from = buffers_[2 * static_cast<size_t>(rank)];
    PlainCopy<<<NumSms(), 1024, 0, stream>>>(reinterpret_cast<const uint4*>(from.get()),
                                             reinterpret_cast<uint4*>(buffers_[2 * next + 1].get()),
                                             remote_bytes() / 16);
  }
  // Bytes that a rank sends.
  int64_t remote_bytes() const {
    const int64_t ranks = static_cast<int64_t>(buffers_.size()) / 2;
    return buffers_[0].bytes() / ranks * (ranks - 1);
  }

 private:
  static ExchangeCall Probe(const Shape& shape) {
    ExchangeCall call;
    call.exchange = shape.Exchange();
    call.batch = shape.batch;
    call.element_bytes = 2;
    return call;
  }
  Heaps heaps_;
  std::vector<Buffer> buffers_;
  std::vector<RankLaunches<ExchangeCall>> launch_;
};

struct Variant {
  const char* name;
  int comm_ctas;
  bool gemm, communicate, exchange;
  int head_rows = 0;
};

template <class Fixture>
bool Bench(Devices& devices, int rows, int columns, int model,
           const KernelEntry<typename Fixture::Call>& entry, int rounds, bool all) {
  using Call = typename Fixture::Call;
  Shape s;
  s.ranks = devices.ranks;
  s.tokens = rows;
  s.heads = {columns / 128};
  s.model = model;
  Fixture f(s, entry);
  const int sms = NumSms();
  std::vector<Variant> variants = {{"pure", sms, true, false, false},
                                   {"separate", sms, true, false, true},
                                   {"exchange", sms, false, false, true},
                                   {"copy", sms, false, false, false},
                                   {"fused", 0, true, true, false}};  // as the heuristic chooses
  const std::vector<int> shares =
      Fixture::kPush ? std::vector<int>{16, 22, 33, 44, 66} : std::vector<int>{44, 66, sms};
  for (int comm : shares) {
    if (!all) break;
    variants.push_back({"fused", comm, true, true, false});
    if (Fixture::kPush) variants.push_back({"fused", comm, true, true, false, 1024});
  }
  const SeparateExchange exchange(s, Fixture::kPush);
  std::vector<RankLaunches<Call>> launches;
  for (const Variant& v : variants) {
    LaunchPlan plan;
    plan.ctas = sms;
    plan.comm_ctas = v.comm_ctas > 0 ? v.comm_ctas : DefaultCommCtas(Call(), sms);
    plan.head_rows = v.head_rows;
    launches.emplace_back(entry, f.Calls(0, v.communicate), plan);
  }
  // Values over the link, on poisoned memory: the first fused variant against fp32, the others
  // against it, bit by bit.
  bool good = true, first = true;
  for (size_t i = 0; i < variants.size(); ++i) {
    if (!variants[i].communicate) continue;
    for (int repeat = 0; repeat < 2; ++repeat) {
      f.PoisonOutputs();
      f.heaps().PoisonSlots(nullptr);
      SyncDevices();
      devices.Time([&](int r, cudaStream_t stream) { launches[i].Run(r, stream); });
      if (first) {
        const Difference d = f.CheckNorm();
        good = good && d.bad == 0 && d.relative < 4e-3;
        f.SaveReference();
        SyncDevices();
        first = false;
      } else {
        f.CompareReference(1.0f);
        good = f.TakeBad() == 0 && good;
      }
    }
  }
  std::vector<std::vector<float>> times(variants.size());
  std::mt19937 random(1);
  std::vector<size_t> order(variants.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = -3; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      const Variant& v = variants[i];
      const float us = devices.Time([&](int r, cudaStream_t stream) {
        if (!v.gemm && !v.exchange) exchange.Copy(r, stream);
        if (v.exchange && (Fixture::kPush || !v.gemm)) exchange.Run(r, stream);
        if (v.gemm) launches[i].Run(r, stream);
        if (v.exchange && !Fixture::kPush && v.gemm) exchange.Run(r, stream);
      });
      if (round >= 0) times[i].push_back(us);
    }
  }
  const double pure = Percentile(times[0], 0.5);
  for (size_t i = 0; i < variants.size(); ++i) {
    const double us = Percentile(times[i], 0.5);
    std::printf(
        "{\"op\":\"%s\",\"devices\":%d,\"rows\":%d,\"columns\":%d,\"model\":%d,"
        "\"tile\":\"%dx%d\",\"variant\":\"%s\",\"comm_ctas\":%d,\"head_rows\":%d,"
        "\"us\":%.1f,"
        "\"us_p10\":%.1f,\"us_p90\":%.1f,\"over_pure\":%.3f,\"remote_mb\":%.2f,\"correct\":%s}\n",
        Fixture::kPush ? "a2a_gemm" : "gemm_a2a", devices.ranks, rows, columns, model,
        entry.tile_rows, entry.tile_columns, variants[i].name, variants[i].comm_ctas,
        variants[i].head_rows, us, Percentile(times[i], 0.1), Percentile(times[i], 0.9), us / pure,
        static_cast<double>(exchange.remote_bytes()) * 1e-6, good ? "true" : "false");
  }
  std::fflush(stdout);
  return good;
}

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
  const bool all = argc > 2;
  CK(cudaGetDeviceCount(&g_devices));
  if (g_devices < 2) {
    std::printf("devices_bench needs two devices\n");
    return 2;
  }
  g_devices = 2;
  Devices devices(g_devices);
  bool good = true;
  const int made[][3] = {{4096, 7168, 5120}, {8192, 6144, 4096}, {1024, 5120, 5120},
                         {4096, 8192, 3072}, {8192, 4096, 2048}, {8192, 8192, 1024}};
  for (const auto& c : made) {  // rows, columns (N), model (K)
    for (const auto& entry : GemmA2aEntries()) {
      if (entry.type == ElementType::kBf16 && !entry.transposed && entry.tile_columns == 256) {
        good =
            Bench<GemmA2aFixture<__nv_bfloat16>>(devices, c[0], c[1], c[2], entry, rounds, all) &&
            good;
      }
    }
  }
  const int gathered[][3] = {{4096, 5120, 5120},  {8192, 4096, 4096}, {1024, 5120, 5120},
                             {4096, 16384, 4096}, {8192, 4096, 2048}, {8192, 4096, 1024}};
  for (const auto& c : gathered) {  // rows, columns (K), model (N)
    const auto entry = A2aGemmEntries()[0];
    good =
        Bench<A2aGemmFixture<__nv_bfloat16>>(devices, c[0], c[1], c[2], entry, rounds, all) && good;
  }
  std::printf("{\"devices_bench\":\"%s\"}\n", good ? "values right" : "VALUES WRONG");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace testing
}  // namespace jax_ulysses

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
