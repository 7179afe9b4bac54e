// SPDX-License-Identifier: Apache-2.0
// Groups that come and go while programs run: late ranks, a busy device, no thread to be had.
#include "group.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <string>
#include <thread>

#include "check.h"
#include "operators_world.h"

namespace {
std::atomic<int> threads_to_refuse{0};
}  // namespace

#if defined(__SANITIZE_THREAD__)
// The sanitizer has a pthread_create of its own.
constexpr bool kCanRefuse = false;
#else
constexpr bool kCanRefuse = true;

// Stands before the system's, also for the C++ library: a thread can be refused.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  if (threads_to_refuse > 0 && threads_to_refuse-- > 0) return EAGAIN;
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, start, argument);
}
#endif

namespace jax_ulysses::testing {
namespace {

using host::CallStatus;

constexpr int kRanks = 3;
const int kSite = 0;

// Why FindRank refuses, or nothing.
std::string Refusal(int64_t session, int32_t device, int64_t run) {
  try {
    FindRank(session, device, run);
  } catch (const std::invalid_argument& refused) {
    return refused.what();
  }
  return "";
}

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// One scatter a rank, submitted rank by rank.
struct Scatter {
  Problem p;
  std::vector<Floats> in, out;
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<CallStatus> statuses;

  Scatter() : in(kRanks), out(kRanks) {
    p.exchange.num_ranks = kRanks;
    p.exchange.head_dim = 2;
    p.exchange.local_tokens = 4;
    p.exchange.num_segments = 1;
    p.exchange.heads[0] = 3;
    for (size_t rank = 0; rank < kRanks; ++rank) {
      in[rank] = Numbers(static_cast<size_t>(p.tokens() * p.columns()), 1);
      out[rank].resize(static_cast<size_t>(p.length() * p.exchange.packed_columns()));
    }
  }

  void SubmitFrom(const RankHandle& handle, int64_t run) {
    host::ExchangeArgs args;
    args.shape = p.shape();
    args.in[0] = reinterpret_cast<const char*>(in[static_cast<size_t>(handle.rank)].data());
    args.out[0] = reinterpret_cast<char*>(out[static_cast<size_t>(handle.rank)].data());
    Submit(handle, {run, &kSite}, [this, handle, args] {
      const CallStatus status = host::RunExchange(handle, args);
      return [this, status] {
        std::lock_guard<std::mutex> lock(mutex);
        statuses.push_back(status);
        ended.notify_all();
      };
    });
  }

  bool Ended(size_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    return ended.wait_for(lock, std::chrono::seconds(20), [&] { return statuses.size() == count; });
  }
};

// An execution whose ranks meet the end of a group must not enter the next one of the session: it
// would hold back what comes after it.
void Successor() {
  Scatter first, second;
  CreateGroup(Config(710, kRanks, 20000));
  const RankHandle late = FindRank(710, 1, 5);
  first.SubmitFrom(FindRank(710, 0, 5), 5);
  DestroyGroup(710);
  JU_CHECK(first.Ended(1));
  // Between two groups; and one that had its handle before, and submits now.
  JU_CHECK(Contains(Refusal(710, 0, 6), "no group for session 710"));
  first.SubmitFrom(late, 8);
  JU_CHECK(first.Ended(2));
  for (const CallStatus& status : first.statuses) JU_CHECK(!status.ok());
  CreateGroup(Config(710, kRanks, 20000));
  for (const int64_t run : {5, 6, 8}) {
    JU_CHECK(Contains(Refusal(710, 2, run), "run it again"));
  }
  for (int32_t rank = 0; rank < kRanks; ++rank) second.SubmitFrom(FindRank(710, rank, 7), 7);
  JU_CHECK(second.Ended(kRanks));
  for (const CallStatus& status : second.statuses) JU_CHECK(status.ok());
  DestroyGroup(710);
  // Another session never had them.
  CreateGroup(Config(711, kRanks, 20000));
  JU_CHECK(Refusal(711, 2, 5).empty());
  DestroyGroup(711);
}

// The line ends with an error on all ranks, and in time.
void NoThread() {
  if (!kCanRefuse) return;
  Scatter scatter;
  CreateGroup(Config(712, kRanks, 20000));
  scatter.SubmitFrom(FindRank(712, 0), 1);
  threads_to_refuse = 1;
  for (int32_t rank = 1; rank < kRanks; ++rank) scatter.SubmitFrom(FindRank(712, rank), 1);
  JU_CHECK(threads_to_refuse == 0);
  JU_CHECK(scatter.Ended(kRanks));
  for (const CallStatus& status : scatter.statuses) {
    JU_CHECK(Contains(status.text, "rank 1 cannot start a thread for a call"));
  }
  DestroyGroup(712);
}

// While a group is made, on a device that may be busy, calls of others go on.
void BusyDevice() {
  std::atomic<bool> called{false};
  bool waits = false;
  RegisterPlatform("busy", [&](const HeapLayout& layout, int64_t, uint32_t start_epoch,
                               const std::vector<Member>&) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (waits && !called && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    JU_CHECK(!waits || called);
    return MakeHostHeap(layout, start_epoch);
  });
  GroupConfig first = Config(713, kRanks, 20000), second = Config(714, kRanks, 20000);
  first.platform = second.platform = "busy";
  CreateGroup(first);
  waits = true;
  std::thread maker([&] { CreateGroup(second); });
  while (Refusal(714, 0, 0).find("is no member") == std::string::npos) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  JU_CHECK(FindRank(713, 1).rank == 1);
  called = true;
  maker.join();
  JU_CHECK(FindRank(714, 2).rank == 2);
  DestroyGroup(713);
  DestroyGroup(714);
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() {
  jax_ulysses::testing::Successor();
  jax_ulysses::testing::NoThread();
  jax_ulysses::testing::BusyDevice();
  return jax_ulysses::testing::Finish("group_test");
}
