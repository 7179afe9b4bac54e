// SPDX-License-Identifier: Apache-2.0
// The CPU operators on threads, without XLA: values, repeatability under changing arrival order,
// and what every rank is told when one of them fails.
#include <algorithm>
#include <chrono>

#include "check.h"
#include "operators_world.h"

namespace jax_ulysses::testing {
namespace {

using host::CallError;
using host::CallStatus;

Problem MakeProblem(int64_t ranks, std::vector<int64_t> heads, bool zigzag, int64_t tokens) {
  Problem problem;
  problem.exchange.num_ranks = ranks;
  problem.exchange.head_dim = 3;
  problem.exchange.local_tokens = tokens;
  problem.exchange.token_order = zigzag ? TokenOrder::kZigzag : TokenOrder::kContiguous;
  problem.exchange.num_segments = static_cast<int64_t>(heads.size());
  for (size_t i = 0; i < heads.size(); ++i) problem.exchange.heads[i] = heads[i];
  problem.batch = 2;
  problem.depth = 11;
  return problem;
}

bool AllOk(const std::vector<CallStatus>& all) {
  for (const CallStatus& status : all) {
    if (!JU_CHECK(status.ok())) std::fprintf(stderr, "  %s\n", status.text.c_str());
  }
  return true;
}

// Makes two ranks late, each time others.
void Disturb(int64_t session, int64_t ranks, int round) {
  for (int i = 0; i < 2; ++i) {
    const int32_t rank = static_cast<int32_t>((3 * round + 2 * i + 1) % ranks);
    InjectFault(session, 0, rank, "delay_ms", 1 + i);
  }
}

void GemmA2a(int64_t session, const Problem& p, int round) {
  const Floats x = Numbers(static_cast<size_t>(p.batch * p.length() * p.depth), 1 + round);
  const Floats w = Numbers(static_cast<size_t>(p.depth * p.columns()), 2);
  const Floats bias = Numbers(static_cast<size_t>(p.columns()), 3);
  Floats y = Multiply(x, w, p.batch * p.length(), p.depth, p.columns());
  for (size_t i = 0; i < y.size(); ++i) y[i] += bias[i % bias.size()];
  AllOk(OnAllRanks(session, p.ranks(), [&](int rank, const RankHandle& handle) {
    const Floats local = p.SequenceShard(x, p.depth, rank);
    host::GemmA2aArgs args;
    args.shape = p.shape();
    args.depth = p.depth;
    args.x = local.data();
    args.w = w.data();
    args.bias = bias.data();
    std::vector<Floats> out;
    for (int64_t seg = 0; seg < p.exchange.num_segments; ++seg) {
      out.emplace_back(p.HeadShard(y, seg, rank).size(), 1e9f);
      args.out[seg] = out.back().data();
    }
    const CallStatus status = host::RunGemmA2a(handle, args);
    for (int64_t seg = 0; seg < p.exchange.num_segments; ++seg) {
      JU_CHECK(out[static_cast<size_t>(seg)] == p.HeadShard(y, seg, rank));
    }
    return status;
  }));
}

void A2aGemm(int64_t session, const Problem& p, int round) {
  const HeadExchange& ex = p.exchange;
  const Floats w = Numbers(static_cast<size_t>(p.columns() * p.depth), 5);
  // Replicas hold the same numbers here, so the sum over them multiplies by their count.
  const Floats parts = Numbers(static_cast<size_t>(p.batch * p.length() * p.columns()), 6 + round);
  Floats summed = parts;
  for (size_t i = 0; i < summed.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % p.columns();
    summed[i] *= static_cast<float>(ex.replicas(ex.Owner(column).segment));
  }
  const Floats y = Multiply(summed, w, p.batch * p.length(), p.columns(), p.depth);
  AllOk(OnAllRanks(session, p.ranks(), [&](int rank, const RankHandle& handle) {
    std::vector<Floats> in;
    host::A2aGemmArgs args;
    args.shape = p.shape();
    args.width = p.depth;
    for (int64_t seg = 0; seg < ex.num_segments; ++seg) {
      in.push_back(p.HeadShard(parts, seg, rank));
      args.parts[seg] = reinterpret_cast<const char*>(in.back().data());
    }
    Floats out(static_cast<size_t>(p.batch * p.tokens() * p.depth), 1e9f);
    Floats gathered(static_cast<size_t>(p.batch * p.tokens() * p.columns()), 1e9f);
    args.w = w.data();
    args.y = out.data();
    args.g = gathered.data();
    const CallStatus status = host::RunA2aGemm(handle, args);
    JU_CHECK(gathered == p.SequenceShard(summed, p.columns(), rank));
    JU_CHECK(out == p.SequenceShard(y, p.depth, rank));
    return status;
  }));
}

CallStatus Scatter(const Problem& p, const RankHandle& handle, uint32_t agreement = 0) {
  const size_t size = static_cast<size_t>(p.batch * p.tokens() * p.columns());
  const Floats in = Numbers(size, 4);
  Floats out(static_cast<size_t>(p.batch * p.length() * p.exchange.packed_columns()));
  host::ExchangeArgs args;
  args.shape = p.shape();
  args.agreement = agreement;
  args.in[0] = reinterpret_cast<const char*>(in.data());
  args.out[0] = reinterpret_cast<char*>(out.data());
  return host::RunExchange(handle, args);
}

void Values() {
  int64_t session = 1;
  for (int64_t ranks : {1, 2, 4, 8}) {
    for (const std::vector<int64_t>& heads :
         std::vector<std::vector<int64_t>>{{8, 8, 8}, {8, 2, 1}, {16, 1}}) {
      for (bool zigzag : {false, true}) {
        for (int64_t tokens : {2, 70}) {
          const Problem p = MakeProblem(ranks, heads, zigzag, tokens);
          // Starts near 2^32 and wraps on the way; both dataflows share flags and slots.
          CreateGroup(Config(session, ranks, 20000));
          for (int round = 0; round < Scaled(4); ++round) {
            Disturb(session, ranks, round);
            GemmA2a(session, p, round);
            A2aGemm(session, p, round);
          }
          DestroyGroup(session++);
        }
      }
    }
  }
}

// Values that round: the result must not depend on who arrives first.
void Repeatable() {
  const Problem p = MakeProblem(8, {8, 2, 1}, true, 70);
  const size_t size = static_cast<size_t>(p.batch * p.length() * p.exchange.packed_columns());
  CreateGroup(Config(900, 8, 20000));
  std::vector<Floats> first(8);
  for (int round = 0; round < Scaled(8); ++round) {
    Disturb(900, 8, round);
    AllOk(OnAllRanks(900, 8, [&](int rank, const RankHandle& handle) {
      Floats in = Numbers(size, 30 + rank);
      for (float& v : in) v *= 0.1f;
      const Floats w = Numbers(static_cast<size_t>(p.columns() * p.depth), 40);
      Floats y(static_cast<size_t>(p.batch * p.tokens() * p.depth));
      Floats g(static_cast<size_t>(p.batch * p.tokens() * p.columns()));
      host::A2aGemmArgs args;
      args.shape = p.shape();
      args.width = p.depth;
      // Every segment reads from the same numbers; the sizes differ.
      for (int64_t seg = 0; seg < 3; ++seg) args.parts[seg] = reinterpret_cast<char*>(in.data());
      args.w = w.data();
      args.y = y.data();
      args.g = g.data();
      const CallStatus status = host::RunA2aGemm(handle, args);
      if (round == 0) first[static_cast<size_t>(rank)] = y;
      JU_CHECK(std::memcmp(y.data(), first[static_cast<size_t>(rank)].data(), y.size() * 4) == 0);
      return status;
    }));
  }
  DestroyGroup(900);
}

// All ranks fail with one text, which names what they must know; so does the next call.
void CheckFailure(int64_t session, const Problem& p, const std::vector<std::string>& words) {
  std::string text;
  for (int again = 0; again < 2; ++again) {
    const auto begin = std::chrono::steady_clock::now();
    const auto all = OnAllRanks(session, p.ranks(),
                                [&](int, const RankHandle& handle) { return Scatter(p, handle); });
    const auto spent = std::chrono::steady_clock::now() - begin;
    for (const CallStatus& status : all) {
      JU_CHECK(status.error == CallError::kAborted);
      if (text.empty()) text = status.text;
      JU_CHECK(status.text == text);
    }
    if (again == 1) JU_CHECK(spent < std::chrono::milliseconds(200));
  }
  for (const std::string& word : words) {
    if (!JU_CHECK(text.find(word) != std::string::npos)) {
      std::fprintf(stderr, "  no '%s' in: %s\n", word.c_str(), text.c_str());
    }
  }
  JU_CHECK(GetGroupInfo(session).closed[0] == text);
}

void Failures() {
  const Problem p = MakeProblem(4, {8}, false, 40);
  const std::string call = "jax_ulysses.exchange.v1 (scatter)";
  struct Case {
    const char* kind;
    int64_t value;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"skip", 0, {call, "rank 2", "epoch 4294967293", "300 ms", "jax_ulysses.initialize"}},
      {"delay_ms", 1500, {call, "rank 2", "300 ms"}},
      {"throw", 0, {call, "rank 2 failed", "injected fault", "epoch 4294967293"}},
      {"shape", 0, {call, "rank 2", "disagree", "epoch 4294967293"}}};
  for (const Case& c : cases) {
    // Destroying and creating again is what recovers.
    CreateGroup(Config(950, 4, 300));
    InjectFault(950, 0, 2, c.kind, c.value);
    CheckFailure(950, p, c.words);
    DestroyGroup(950);
    CreateGroup(Config(950, 4, 20000));
    AllOk(OnAllRanks(950, 4, [&](int, const RankHandle& handle) { return Scatter(p, handle); }));
    DestroyGroup(950);
  }
}

void DestroyedDuringCall() {
  const Problem p = MakeProblem(4, {8}, false, 40);
  CreateGroup(Config(960, 4, 20000));
  InjectFault(960, 0, 1, "skip", 0);
  std::thread destroyer([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    DestroyGroup(960);
  });
  const auto all = OnAllRanks(960, 4, [&](int, const RankHandle& h) { return Scatter(p, h); });
  destroyer.join();
  for (const CallStatus& status : all) {
    JU_CHECK(status.error == CallError::kAborted);
    JU_CHECK(status.text.find("was destroyed") != std::string::npos);
  }
}

void SlotTooSmall() {
  const Problem p = MakeProblem(4, {8}, false, 12000);
  CreateGroup(Config(970, 4, 20000));
  const auto all = OnAllRanks(970, 4, [&](int, const RankHandle& h) { return Scatter(p, h); });
  const std::string needed = std::to_string(p.shape().slot_bytes());
  for (const CallStatus& status : all) {
    JU_CHECK(status.error == CallError::kSlotTooSmall);
    JU_CHECK(status.text.find(needed) != std::string::npos);
    JU_CHECK(status.text.find(std::to_string(1 << 20)) != std::string::npos);
  }
  // The group is still good.
  const Problem small = MakeProblem(4, {8}, false, 4);
  AllOk(OnAllRanks(970, 4, [&](int, const RankHandle& h) { return Scatter(small, h); }));
  DestroyGroup(970);
}

// Faults that only kernels raise, as the host words them.
void FaultsOfKernels() {
  GroupConfig config;
  config.num_ranks = 4;
  const Line line(config, 0, {},
                  [](const HeapLayout& layout, int64_t, uint32_t start,
                     const std::vector<Member>&) { return MakeHostHeap(layout, start); });
  Fault fault;
  fault.kind = FaultKind::kRankMismatch;
  fault.op = Operator::kGemmA2a;
  fault.rank = 3;
  fault.detail = 1;
  const std::string text = line.Describe(fault);
  JU_CHECK(text.find("jax_ulysses.gemm_a2a.v1: rank 3 of the group is rank 1 in this program") ==
           0);
  JU_CHECK(text.find("device order differs") != std::string::npos);
  JU_CHECK(text.find("deadline") == std::string::npos);
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() {
  jax_ulysses::testing::Values();
  jax_ulysses::testing::Repeatable();
  jax_ulysses::testing::Failures();
  jax_ulysses::testing::DestroyedDuringCall();
  jax_ulysses::testing::SlotTooSmall();
  jax_ulysses::testing::FaultsOfKernels();
  return jax_ulysses::testing::Finish("operators_test");
}
