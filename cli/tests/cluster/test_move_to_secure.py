"""The steps of docs/securing-a-cluster.md, "From an open cluster in use", on a cluster of processes under traffic.

The test reads the steps, the settings of the recipe "By hand" and the final checks from the page, so the page cannot
differ from what is tested. Names of hosts and ports of the page are replaced with those of the test.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import forked_cluster
import pytest
from bindery.standalone.options import Options
from bindery.standalone.plan import HOST, ZOOKEEPER_PORT, Kind, plan_cluster
from bindery.standalone.process import STOP_TIMEOUT_S, Child, ChildState
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.stores import embedded
from bindery_metadata.stores.embedded import SecurePort, ServerSpec
from command import bindery
from moving_clients import MovingClients, Site
from recipe import Recipe, Step

pytestmark = [pytest.mark.integration, pytest.mark.long_run, pytest.mark.timeout(900)]

PROGRAMS: Final = Path(sys.executable).parent
READY_TIMEOUT_S: Final = 120.0
"""Maximum seconds until a process that was started is ready."""
GUEST: Final = "guest"
CLERK: Final = "clerk"


class MovedCluster:
    """ZooKeeper, 3 bookies, an auditor and 2 brokers, whose settings follow the steps of the page.

    `settings`: the settings by kind of service, as flags, beyond those of `bindery standalone`.
    """

    def __init__(self, base: ThrowawayCluster, recipe: Recipe) -> None:
        self.base, self.recipe = base, recipe
        self.secrets = base.directory.root / "secrets"
        self.secure_port = ZOOKEEPER_PORT + base.port_offset + 1
        self.server = ServerSpec(base.directory.root / "zookeeper-0", ZOOKEEPER_PORT + base.port_offset)
        options = Options(
            bookies=base.bookies, brokers=base.brokers, auditors=base.auditors, port_offset=base.port_offset
        )
        plan = plan_cluster(options, root=base.directory.root, zookeeper_command=self._zookeeper_command)
        self.plans = {one.name: one for one in plan.processes}
        self.children: dict[str, tuple[Child, asyncio.Task[int]]] = {}
        self.settings: dict[Kind, dict[str, tuple[str, ...]]] = {
            kind: {"insecure": ("--insecure",)} for kind in (Kind.BOOKIE, Kind.AUDITOR, Kind.BROKER)
        }
        self.site = Site([base.broker_url(i) for i in range(base.brokers)], self.secrets / "ca.crt")

    def _zookeeper_command(self, server: ServerSpec, ensemble: object) -> list[str]:
        config = embedded.write_config(server)
        return embedded.command(java=embedded.find_java(), jars=embedded.find_jars(), config=config)

    def names(self, kind: Kind) -> list[str]:
        return [name for name, plan in self.plans.items() if plan.kind is kind]

    # --- the names of the page ----------------------------------------------------------------------------------------

    def here(self, text: str, name: str = "") -> str:
        """Return `text` of the page with the paths, hosts and ports of this cluster. `name`: process of the text."""
        kind = name.rpartition("-")[0]
        if kind in ("bookie", "broker"):
            text = re.sub(rf"\b{kind}-0\b", name, text)
        text = text.replace("/etc/bindery", str(self.secrets))
        text = text.replace("/etc/zookeeper", str(self.secrets))
        text = re.sub(r"zk\.example\.com:2281", f"{HOST}:{self.secure_port}", text)
        text = text.replace("secureClientPort=2281", f"secureClientPort={self.secure_port}")
        for number in range(self.base.brokers):
            url = self.base.broker_url(number).replace("http:", "https:")
            text = text.replace(f"https://broker-{number}.example.com:8080", url)
            text = text.replace(f"http://broker-{number}.example.com:8080", url.replace("https:", "http:"))
        for url, service in ((self.base.auditor_url(), "auditor"), (self.base.bookie_url(), "bookie-0")):
            text = re.sub(
                rf"(https?)://{service}\.example\.com:\d+",
                lambda found, url=url: url.replace("http:", found[1] + ":"),  # type: ignore[misc]
                text,
            )
        return re.sub(r"[\w-]+\.example\.com", HOST, text)

    def environment(self) -> dict[str, str]:
        """Return the environment of step 3, "Use it"."""
        return {
            name: str(self.secrets / value) if name.endswith("_FILE") else self.here(value)
            for name, value in self.recipe.environment.items()
        }

    # --- processes ----------------------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        plan = self.plans[name]
        flags = [word for words in self.settings.get(plan.kind, {}).values() for word in words]
        is_tls = bool(plan.ca_file) or "http.tls.certificate_file" in self.settings.get(plan.kind, {})
        plan = replace(
            plan,
            command=(*plan.command, *(self.here(flag, name) for flag in flags)),
            ca_file=str(self.secrets / "ca.crt") if is_tls else "",
        )
        child = Child(plan, self.base.directory, clock=time.monotonic)
        await child.start()
        self.children[name] = child, asyncio.create_task(child.wait_end())
        try:
            await asyncio.wait_for(child.wait_ready(), READY_TIMEOUT_S)
        except TimeoutError:
            pytest.fail(f"{name} is not ready after {READY_TIMEOUT_S:.0f} s: {child.waiting_for}")
        log = "\n".join(child.log_tail(20))
        assert child.state is ChildState.READY, f"{name} ended at its start; its settings: {flags}\n{log}"

    async def stop(self, name: str) -> None:
        child, ended = self.children.pop(name)
        child.terminate()
        code = await asyncio.wait_for(ended, 2 * STOP_TIMEOUT_S)
        assert code in (0, 143) or child.plan.kind is Kind.ZOOKEEPER, f"{name} ended with {code}"

    async def restart(self, name: str) -> None:
        await self.stop(name)
        await self.start(name)

    def create_secrets(self) -> None:
        """Run step 1 of the recipe, with the other bookies and the role of clients in addition."""
        words = [self.here(word) for word in self.recipe.create_secrets]
        words[words.index("secrets")] = str(self.secrets)
        run(*words, *("--server", f"bookie-1={HOST}", "--server", f"bookie-2={HOST}"), *("--role", CLERK))

    def secure_port_of_page(self) -> SecurePort:
        """Return the port of ZooKeeper with TLS. Its lines in the configuration are those of the page."""
        secure = SecurePort(self.secure_port, self.secrets / "zookeeper.pem", self.secrets / "ca.crt")
        lines = [self.here(line) for line in self.recipe.zookeeper]
        assert [line for line in lines if line not in secure.lines(HOST)] == [], "the page has other lines"
        return secure

    async def restart_zookeeper(self, server: ServerSpec) -> None:
        """Restart ZooKeeper, or start it, with these settings."""
        self.server = server
        embedded.write_config(server)
        if not server.client_port:
            plan = self.plans["zookeeper-0"]
            ca_file = str(self.secrets / "ca.crt")
            self.plans["zookeeper-0"] = replace(plan, ports=(("clients", self.secure_port),), ca_file=ca_file)
        if "zookeeper-0" in self.children:
            await self.stop("zookeeper-0")
        await self.start("zookeeper-0")

    async def change(self, step: Step) -> None:
        """Change the settings of a step, and restart the processes one after the other."""
        known = {setting for kind in step.kinds for setting in self.recipe.settings[kind]}
        assert set(step.settings) <= known, f"step {step.number} has settings that the recipe has not"
        for kind in step.kinds:
            current = self.settings[kind]
            for setting in step.removed:
                del current[setting]
            for setting in step.settings:
                if setting in self.recipe.settings[kind]:
                    current[setting] = self.recipe.settings[kind][setting]
            current |= {setting: (f"--{flag_of(setting)}", value) for setting, value in step.values.items()}
            for name in self.names(kind):
                if kind is Kind.BROKER and "http.tls.certificate_file" in step.settings:
                    self.site.use_https(self.names(kind).index(name))
                await self.restart(name)

    async def close(self) -> None:
        for child, _ in self.children.values():
            child.kill()
        await asyncio.gather(*(ended for _, ended in self.children.values()))


def flag_of(setting: str) -> str:
    return setting.replace(".", "-").replace("_", "-")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThrowawayCluster]:
    """The directory and the ports of a cluster. Its processes are forked, which takes less time than executing them."""
    for name in list(os.environ):
        if name.startswith("BINDERY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asyncio.create_subprocess_exec)  # restored at the end
    forked_cluster.fork_instead_of_executing()
    base = ThrowawayCluster(bookies=3, brokers=2)
    yield base
    base.close()


def run(*words: str, stdin: str | None = None) -> str:
    done = bindery(*words, stdin=stdin, timeout_s=120)
    assert done.returncode == 0, f"bindery {' '.join(words)}: {done.stderr}{done.stdout}"
    return done.stdout


def check_nothing_is_open(cluster: MovedCluster) -> None:
    """Run step 4 of the page in a shell. The comment of each line is what its output must contain."""
    checks = cluster.recipe.checks
    assert len(checks) >= 8
    for line, comment in checks[:-1]:
        output = shell(cluster, line)
        expected = re.sub(r"^4\d\d ", "", comment).split(" ... ")
        assert all(words in output for words in expected), f"{line}\n{output}"
    check_access_lists(cluster)


def check_access_lists(cluster: MovedCluster) -> None:
    line, comment = cluster.recipe.checks[-1]
    assert comment == "counts 0 open nodes"
    found = json.loads(shell(cluster, f"{line} --json"))
    assert found["totals"]["open"] == 0, found
    assert found["totals"]["creator"] == found["nodes"] > 0, found


def shell(cluster: MovedCluster, line: str) -> str:
    """Run a line of the page. Return its output."""
    done = subprocess.run(
        ["sh", "-c", cluster.here(line)],
        cwd=cluster.secrets,
        env={**os.environ, **cluster.environment(), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


async def test_an_open_cluster_is_secured_by_the_steps_of_the_page_under_traffic(
    base: ThrowawayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = MovedCluster(base, Recipe.of_page())
    recipe = cluster.recipe
    clients = MovingClients(cluster.site)

    async def open_secure_port() -> None:
        cluster.create_secrets()
        await cluster.restart_zookeeper(replace(cluster.server, secure=cluster.secure_port_of_page()))

    async def restrict_zookeeper() -> None:
        for name, value in cluster.environment().items():
            monkeypatch.setenv(name, value)
        run(*step_commands(7)[0])
        await cluster.restart_zookeeper(replace(cluster.server, client_port=0))

    def step_commands(number: int) -> list[list[str]]:
        return recipe.steps[number - 1].commands

    def give_tokens() -> None:
        clients.with_tokens(cluster.secrets / f"{CLERK}.token")

    def grant() -> None:
        explain = [*step_commands(10)[0], f"public/default/{clients.topics[0].name}", "--action", "produce"]
        assert "if it were on, the role could not" in run(*explain, "--role", GUEST)
        for role in (CLERK, GUEST):
            run("permissions", "grant", "public/default", "--role", role, "--action", "produce", "--action", "consume")
        assert "if it were on, the role could: " in run(*explain, "--role", GUEST)

    async def end_guests() -> None:
        clients.all_with_tokens()
        await clients.progress()
        run("permissions", "revoke", "public/default", "--role", GUEST)
        await cluster.change(recipe.steps[11])

    try:
        await cluster.start("zookeeper-0")
        run("cluster", "init", "--zookeeper", base.zookeeper)
        await asyncio.gather(*(cluster.start(name) for name in cluster.plans if name != "zookeeper-0"))
        with clients.running():
            await clients.progress()
            for step in recipe.steps:
                began = time.monotonic()
                match step.number:
                    case 1:
                        await open_secure_port()
                    case 7:
                        await restrict_zookeeper()
                    case 8:
                        give_tokens()
                    case 10:
                        grant()
                    case 12:
                        await end_guests()
                    case 13:
                        check_nothing_is_open(cluster)
                    case 9:
                        with clients.roles_change():
                            await cluster.change(step)
                            await clients.progress()
                    case _:
                        assert step.settings, f"step {step.number} has no settings and no code here"
                        await cluster.change(step)
                await clients.progress()
                print(f"step {step.number}: {time.monotonic() - began:.1f} s; {clients.report()}")
        # The settings are those of the recipe, without exception.
        assert cluster.settings == recipe.settings
        await asyncio.to_thread(clients.check)
    finally:
        await cluster.close()


async def test_the_recipe_by_hand_makes_a_secure_cluster(
    base: ThrowawayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 3. The end of the move above has the same settings and runs step 4; here are the access lists of a
    cluster that never was open."""
    cluster = MovedCluster(base, Recipe.of_page())
    cluster.create_secrets()
    cluster.settings = cluster.recipe.settings
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    init, *others, explain = cluster.recipe.use
    try:
        await cluster.restart_zookeeper(replace(cluster.server, client_port=0, secure=cluster.secure_port_of_page()))
        run(*init)
        await asyncio.gather(*(cluster.start(name) for name in cluster.plans if name != "zookeeper-0"))
        for words in others:
            run(*words)
        assert "clerk may produce" in run(*explain)
        monkeypatch.setenv("BINDERY_TOKEN_FILE", str(cluster.secrets / f"{CLERK}.token"))
        for number in range(base.brokers):
            url = base.broker_url(number).replace("http:", "https:")
            assert run("produce", "shop/orders/new", "--url", url, stdin="order\n") == "1 message sent\n"
        check_access_lists(cluster)
    finally:
        await cluster.close()
