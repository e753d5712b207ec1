#!/usr/bin/env bash
# Brings a fresh Debian machine to where `make demo` and `make test` work. The demo needs Python, a virtual environment with the
# package and its dependencies, and Java for Spark; the tests also what they are run with, and the servers that they start.
# Usage: scripts/setup.sh VENV_DIRECTORY [STAMP] [demo|tests]        (called by the Makefile; safe to run again)
# STAMP is a file that is touched when there is nothing more to try: not if Java or Maven could have been installed and that failed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp=${2:-}
purpose=${3:-tests}

# With the seconds since the beginning: what takes long is seen.
say() { printf 'setup: %3d s  %s\n' "$SECONDS" "$*" >&2; }
die() { say "$1"; say "To fix: $2"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# How this user may install packages: directly as root, by sudo without a password, or not at all.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
can_install() { have apt-get && { [ "$(id -u)" = 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }; }

updated=
apt_install() {
    can_install || return 1
    say "installing $*"
    if [ -z "$updated" ]; then as_root apt-get update -qq >&2 || return 1; updated=yes; fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

# What is good to have: if installing it fails (the network, say), the next run tries again; if this user may install nothing, none does.
worth_another_try=
apt_install_optional() {
    can_install || return 1
    apt_install "$@" || { worth_another_try=yes; return 1; }
}

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
find_python() {
    local name
    for name in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
        if have "$name" && is_recent_python "$name"; then command -v "$name"; return 0; fi
    done
    return 1
}

ensure_python() {
    find_python >/dev/null || apt_install python3 python3-venv || true
    python=$(find_python) || die "no Python 3.11 or newer was found" "apt-get install python3 python3-venv, or set PYTHON=/path/to/python3"
}

ensure_venv() {
    if [ -x "$venv/bin/python" ] && is_recent_python "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        apt_install python3-venv || die "this Python cannot make virtual environments" "apt-get install python3-venv"
    fi
    say "making a virtual environment in $venv with $python"
    "$python" -m venv --clear "$venv"
}

install_package() {
    say "installing headrace and its dependencies"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$1" >&2
}

# Spark takes the Java in JAVA_HOME before the one on the PATH.
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
java_version() { "$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1; }
has_java() { have "$java" && [ "$(java_version)" -ge 17 ] 2>/dev/null; }

# The demo and the Spark tests need Java; the log does not. So a machine without it is told, and goes on.
# Which version a release of Debian has differs (12 has 17, 13 has 21), so its default is asked for.
ensure_java() {
    if has_java; then return; fi
    if [ -n "${JAVA_HOME:-}" ]; then
        say "there is no Java 17 or newer in JAVA_HOME ($JAVA_HOME): whatever needs Spark will say so. To fix: unset JAVA_HOME, or set it to a newer Java"
    elif ! { apt_install_optional default-jre-headless && has_java; }; then
        say "Java 17 or newer is missing: whatever needs Spark will say so. To fix: apt-get install default-jre-headless"
    fi
}

ensure_maven() {
    if have mvn; then return; fi
    apt_install_optional maven || say "Maven is missing: tests against a real Kafka broker are skipped. To fix: apt-get install maven"
}

# Servers that the tests of change capture, sinks and gateways start for themselves. Debian keeps Postgres's programs out of the PATH.
ensure_postgres() {
    if compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || have postgres; then return; fi
    apt_install_optional postgresql || say "Postgres is missing: tests against a real one are skipped. To fix: apt-get install postgresql"
}

ensure_mariadb() {
    if have mariadbd; then return; fi
    apt_install_optional mariadb-server || say "MariaDB is missing: tests against a real one are skipped. To fix: apt-get install mariadb-server"
}

ensure_redis() {
    if have redis-server; then return; fi
    apt_install_optional redis-server || say "Redis is missing: tests against a real one are skipped. To fix: apt-get install redis-server"
}

# A browser for the tests of the dashboard.
ensure_chromium() {
    if have chromium || have chromium-browser || have google-chrome; then return; fi
    apt_install_optional chromium || say "Chromium is missing: tests of the dashboard in a browser are skipped. To fix: apt-get install chromium"
}

# What the guide asks servers with.
ensure_curl() {
    if have curl; then return; fi
    apt_install_optional curl || say "curl is missing: tests of pages that use it are skipped. To fix: apt-get install curl"
}

ensure_rabbitmq() {
    if [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]; then return; fi
    apt_install_optional rabbitmq-server || say "RabbitMQ is missing: tests against a real one are skipped. To fix: apt-get install rabbitmq-server"
}

ensure_mosquitto() {
    if have mosquitto || [ -x /usr/sbin/mosquitto ]; then return; fi
    apt_install_optional mosquitto || say "Mosquitto is missing: tests of the MQTT example are skipped. To fix: apt-get install mosquitto"
}

ensure_python
ensure_venv
if [ "$purpose" = demo ]; then
    install_package .
    ensure_java
else
    install_package '.[dev,kafka,registry,connect,postgres,mysql,redis,search,delta,iceberg,objectstore,events,zeromq,amqp,mqtt]'
    ensure_java
    ensure_maven
    ensure_postgres
    ensure_mariadb
    ensure_redis
    ensure_chromium
    ensure_rabbitmq
    ensure_mosquitto
    ensure_curl
fi
if [ -n "$worth_another_try" ]; then
    say "ready, apart from what is missing; the next run tries to install it again"
else
    if [ -n "$stamp" ]; then touch "$stamp"; fi
    say "ready"
fi
