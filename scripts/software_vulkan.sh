#!/bin/sh
# Say whether Mesa's software Vulkan is here; install it where that needs nobody's password.
set -eu

present() {
    ls /usr/share/vulkan/icd.d/lvp_icd*.json >/dev/null 2>&1
}

if ! present && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "software Vulkan: installing mesa-vulkan-drivers ..." >&2
    if ! apt-get install -y -qq mesa-vulkan-drivers >/dev/null 2>&1; then
        apt-get update -qq && apt-get install -y -qq mesa-vulkan-drivers >/dev/null || true
    fi
fi
if present; then
    echo "software Vulkan: present" >&2
else
    echo "software Vulkan: missing, its tests are skipped (Debian: apt install mesa-vulkan-drivers)" >&2
fi
