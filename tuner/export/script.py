"""`start.sh`: a group on one host, started and ended as one."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tuner.export.files import stem
from tuner.export.group import (
    FRONT_PORT,
    PROMETHEUS_PORT,
    SERVER_PORT,
    SIDE_CHANNEL_PORT,
    Server,
    describe,
    servers,
    urls_by_role,
)
from tuner.serving import ServingConfig, front_argv

FUNCTIONS = r"""
servers=   # NAME:PORT:PID of each
front=

say() { printf '%s\n' "start.sh: $*" >&2; }
fail() { say "$@"; exit 1; }

healthy() {  # URL
  if command -v curl >/dev/null 2>&1; then
    curl --noproxy '*' --max-time 5 -fso /dev/null "$1" 2>/dev/null
  else
    python3 -c 'import sys, urllib.request as r
r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=5)' "$1" >/dev/null 2>&1
  fi
}

taken() {  # PORT: whether anything listens there, whatever it speaks
  if command -v curl >/dev/null 2>&1; then
    curl --noproxy '*' --max-time 2 -so /dev/null "http://127.0.0.1:$1/" 2>/dev/null || [ $? -ne 7 ]
  else
    python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)' "$1" 2>/dev/null
  fi
}

lives() { kill -0 "$1" 2>/dev/null; }

check() {  # ends the script when a server has ended
  for each in $servers; do
    lives "${each##*:}" || fail "${each%%:*} ended: see $here/logs/${each%%:*}.log"
  done
}

# shellcheck disable=SC2329  # the trap calls it
stop() {
  trap - EXIT
  trap '' HUP INT TERM
  for process in $front $servers; do kill -s TERM "${process##*:}" 2>/dev/null || :; done
  say "waiting up to $STOP_TIMEOUT s for all to end"
  left=$STOP_TIMEOUT
  while [ "$left" -gt 0 ]; do
    living=
    for process in $front $servers; do if lives "${process##*:}"; then living=yes; fi; done
    [ -n "$living" ] || break
    sleep 1
    left=$((left - 1))
  done
  # What is left of their sessions, as workers that outlived their server.
  for process in $front $servers; do kill -s KILL -- "-${process##*:}" 2>/dev/null || :; done
}

launch() {  # NAME PORT and what `serve` needs
  name=$1 port=$2
  shift 2
  if taken "$port"; then fail "port $port is taken: set SERVER_PORT"; fi
  serve "$port" "$@" >"$here/logs/$name.log" 2>&1 9>&- &
  servers="$servers $name:$port:$!"
}
"""

WAITING = r"""
deadline=$(($(date +%s) + START_TIMEOUT))
for server in $servers; do
  port=${server#*:}
  until healthy "http://127.0.0.1:${port%:*}/health"; do
    check
    [ "$(date +%s)" -lt "$deadline" ] || fail "${server%%:*} is not ready after $START_TIMEOUT s: see $here/logs$maybe"
    sleep 1
  done
done
check
exec 9>&-
"""

UNGUARDED = r"""case ${VLLM_API_KEY:+$HOST} in
  '' | 127.* | localhost | ::1) ;;
  *) say "the front asks nobody for a key: whoever reaches $HOST:$PORT is served" ;;
esac
"""

GUARDING = r"""
front=front:$PORT:$!
while lives "${front##*:}"; do
  check
  if [ -z "$told" ] && healthy "http://$HOST:$PORT/health"; then
    told=yes
    say "ready at http://$HOST:$PORT"
  fi
  sleep 1
done
status=0
wait "${front##*:}" || status=$?
fail "the front ended with $status: see $here/logs/front.log"
"""


def start_sh(
    config: ServingConfig,
    comments: Sequence[str],
    *,
    program: str | None = None,
    front_program: str | None = None,
    gpus: bool = False,
    plugin: bool = False,
) -> str:
    """Return the script.

    Args:
        config: of the group.
        comments: lines of provenance.
        program: vLLM's program, where the command's own word would not do.
        front_program: likewise for the front.
        gpus: whether the host has GPUs to share out.
        plugin: whether there is a folder of Python for the servers.
    """
    parts = [
        "#!/bin/sh\n",
        "".join(f"# {line}\n" for line in [*comments, "", *_about(config)]).replace("# \n", "#\n"),
        _settings(config, gpus=gpus),
        FUNCTIONS,
        _serve(config, program, gpus=gpus, plugin=plugin),
        _checks(config, gpus=gpus),
        "trap stop EXIT\ntrap 'exit 129' HUP\ntrap 'exit 130' INT\ntrap 'exit 143' TERM\n\n",
        *(_launch(config, server, gpus=gpus) for server in servers(config)),
        WAITING,
        _front(config, front_program),
        GUARDING,
    ]
    return "".join(parts)


def _about(config: ServingConfig) -> list[str]:
    return [
        f"Starts {describe(config)} and their front on this host, waits until they are ready, and stays.",
        "It ends all of them when it is told to end (Ctrl-C, TERM), and when one of them ends. Their output is in",
        "logs/ beside this file. Secrets (HF_TOKEN, VLLM_API_KEY) come from your shell.",
    ]


def _settings(config: ServingConfig, *, gpus: bool) -> str:
    rows = [
        ("HOST", "127.0.0.1", "where the front listens; 0.0.0.0 for all interfaces"),
        ("PORT", str(FRONT_PORT), "of the front"),
        ("SERVER_PORT", str(SERVER_PORT), f"of the first server; {config.topology.n_servers} are taken from here on"),
        ("PROMETHEUS_PORT", str(PROMETHEUS_PORT), "the front's own metrics"),
    ]
    if config.topology.is_pd:
        rows.append(("SIDE_CHANNEL_PORT", str(SIDE_CHANNEL_PORT), "where servers agree on transfers, from here on"))
        rows.append(("SIDE_CHANNEL_HOST", "${VLLM_NIXL_SIDE_CHANNEL_HOST:-127.0.0.1}", "likewise"))
    rows.append(("START_TIMEOUT", "600", "seconds until all servers are ready"))
    rows.append(("STOP_TIMEOUT", "60", "seconds that servers have to end before they are killed"))
    lines = ["set -eu", 'here=$(CDPATH=\'\' cd -- "$(dirname -- "$0")" && pwd)', ""]
    lines += [f"{f'{name}=${{{name}:-{default}}}':<62} # {about}" for name, default, about in rows]
    if gpus:
        every = ",".join(str(gpu) for gpu in range(config.n_gpus))
        lines.append(f"{f'GPUS=${{GPUS-{every}}}':<62} # shared out in this order; empty: the servers see all")
    return "\n".join(lines) + "\n"


def _serve(config: ServingConfig, program: str | None, *, gpus: bool, plugin: bool) -> str:
    """Return the function that becomes a server, in a session of its own so that its family can be ended."""
    names, takes = ["PORT", "ROLE"], ["1", "2"]
    body = ["  set -a", "  # shellcheck source=/dev/null", '  . "$here/$2.env"']
    if config.topology.is_pd:
        names.append("SIDE_CHANNEL_PORT")
        takes.append("3")
        body.append('  export VLLM_NIXL_SIDE_CHANNEL_HOST="$SIDE_CHANNEL_HOST" VLLM_NIXL_SIDE_CHANNEL_PORT="$3"')
    if gpus:
        names.append("GPUS")
        which = "$" + str(len(names))
        body += [
            '  if [ -n "$GPUS" ]; then',
            "    export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES",
            f'    CUDA_VISIBLE_DEVICES=$(printf \'%s\\n\' "$GPUS" | cut -d, -f"{which}")',
            "  fi",
        ]
    if plugin:
        body.append('  export PYTHONPATH="$here/plugin${PYTHONPATH:+:$PYTHONPATH}"')
    words = [_found(program or config.command[0]), *config.command[1:]]
    body.append(f'  exec setsid {shlex.join(words)} --config "$here/$2.yaml" --host 127.0.0.1 --port "$1"')
    return "\n".join([f"\nserve() {{  # {' '.join(names)}", *body, "}", "", ""])


def _found(program: str) -> str:
    """Return a path that holds wherever the script is started from."""
    return str(Path(program).absolute()) if "/" in program else program


def _checks(config: ServingConfig, *, gpus: bool) -> str:
    lines = ["command -v setsid >/dev/null 2>&1 || fail 'setsid (of util-linux) is missing'"]
    if gpus:
        lines += [
            "n_gpus=$(printf '%s\\n' \"$GPUS\" | tr ',' '\\n' | wc -l)",
            f'if [ -n "$GPUS" ] && [ "$n_gpus" -lt {config.n_gpus} ]; then',
            f'  fail "{config.n_gpus} GPUs are needed, and GPUS=$GPUS names fewer"',
            "fi",
        ]
    maybe = "; is a port from SIDE_CHANNEL_PORT=$SIDE_CHANNEL_PORT on taken?" if config.topology.is_pd else ""
    lines += [
        f'maybe="{maybe}"',
        "# vLLM servers of two groups could share a port unseen: only one group starts at a time.",
        'exec 9>"${TMPDIR:-/tmp}/tune-start-$(id -u).lock"',
        "flock -n 9 || fail 'another group is starting: wait until it is ready'",
        'if taken "$PORT"; then fail "port $PORT is taken: set PORT"; fi',
        'mkdir -p "$here/logs"',
    ]
    return "\n".join(lines) + "\n"


def _launch(config: ServingConfig, server: Server, *, gpus: bool) -> str:
    words = ["launch", server.name, f"$((SERVER_PORT + {server.number}))", stem(server.role)]
    if config.topology.is_pd:
        words.append(f"$((SIDE_CHANNEL_PORT + {server.side_channel}))")
    if gpus:
        words.append(",".join(str(gpu + 1) for gpu in server.gpus))  # as `cut` counts
    return " ".join(words) + "\n"


def _front(config: ServingConfig, program: str | None) -> str:
    """Return the line that starts the front, the numbers in it left to the script's settings."""
    shell = {server: f'"http://127.0.0.1:$((SERVER_PORT + {server.number}))"' for server in servers(config)}
    urls = {server: f"http://127.0.0.1:{SERVER_PORT + server.number}" for server in shell}
    argv = front_argv(config, "HOST", FRONT_PORT, urls_by_role(config, urls), prometheus_port=PROMETHEUS_PORT)
    words = [_found(program or config.front.command[0]), *argv[1:]]
    settings = {"--host": '"$HOST"', "--port": '"$PORT"', "--prometheus-port": '"$PROMETHEUS_PORT"'}
    by_url = {urls[server]: text for server, text in shell.items()}
    said = [
        settings.get(before) or by_url.get(word) or shlex.quote(word)
        for before, word in zip(["", *words], words, strict=False)
    ]
    command = " ".join(said).replace(" --", " \\\n  --")
    # Before prefillers and decoders the front puts this key in place of the client's.
    key = 'if [ -n "${VLLM_API_KEY-}" ]; then export OPENAI_API_KEY="$VLLM_API_KEY"; fi\n'
    about = key + UNGUARDED if config.topology.is_pd else ""
    return f'\ntold=\n{about}setsid {command} >"$here/logs/front.log" 2>&1 &'
