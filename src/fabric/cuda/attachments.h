// A transport's places in the lists that call it back: taken when the object is whole, left in
// reverse order however its life ends, also when its constructor throws between two of them.
#pragma once

#include <memory>
#include <utility>

#include "penstock/fabric/team.h"
#include "penstock/fabric/window.h"

namespace penstock::cuda {

class HookPlace {
 public:
  HookPlace(TeamHandle team, RearmHook* hook) : team_(std::move(team)), hook_(hook) {
    team_->add_hook(hook_);
  }
  ~HookPlace() { team_->remove_hook(hook_); }
  HookPlace(const HookPlace&) = delete;
  HookPlace& operator=(const HookPlace&) = delete;

 private:
  TeamHandle team_;
  RearmHook* hook_;
};

class UserPlace {
 public:
  UserPlace(std::shared_ptr<Window> window, WindowUser* user)
      : window_(std::move(window)), user_(user) {
    window_->add_user(user_);
  }
  ~UserPlace() { window_->remove_user(user_); }
  UserPlace(const UserPlace&) = delete;
  UserPlace& operator=(const UserPlace&) = delete;

 private:
  std::shared_ptr<Window> window_;
  WindowUser* user_;
};

}  // namespace penstock::cuda
