"""A YAML language server, asked as an editor asks it. Needs `npm`, or makes an environment that has it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {"validate": True, "hover": True, "completion": True, "schemaStore": {"enable": False}}


def install(folder: Path) -> list[str]:
    """The command that starts a server, put into `folder`."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        subprocess.run([sys.executable, "-m", "nodeenv", "--prebuilt", str(folder / "node")], check=True)
        npm, node = (str(folder / "node" / "bin" / name) for name in ("npm", "node"))
    subprocess.run([npm, "install", "--silent", "--prefix", str(folder), "yaml-language-server@1.25.0"], check=True)
    return [node, str(folder / "node_modules" / "yaml-language-server" / "bin" / "yaml-language-server"), "--stdio"]


class LanguageServer:
    """The few requests of the protocol that the test has. Lines and columns count from 0."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._folder = folder
        self._asked = 0
        self._told: list[dict[str, Any]] = []
        workspace = {"configuration": True, "didChangeConfiguration": {}}
        self._ask("initialize", processId=None, rootUri=folder.as_uri(), capabilities={"workspace": workspace})
        self._send(method="initialized", params={})
        self._send(method="workspace/didChangeConfiguration", params={"settings": {"yaml": SETTINGS}})

    def mistakes(self, name: str, text: str) -> dict[int, str]:
        """Opens a file; what the editor would underline, by line."""
        document = {"uri": self._uri(name), "languageId": "yaml", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        while True:
            for told in self._told:
                if told["method"].endswith("publishDiagnostics") and told["params"]["uri"] == document["uri"]:
                    self._told.remove(told)
                    return {d["range"]["start"]["line"]: d["message"] for d in told["params"]["diagnostics"]}
            self._hear()

    def hover(self, name: str, line: int, column: int) -> str:
        return self._at("hover", name, line, column)["contents"]["value"]

    def completions(self, name: str, line: int, column: int) -> list[str]:
        return [item["label"] for item in self._at("completion", name, line, column)["items"]]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _uri(self, name: str) -> str:
        return (self._folder / name).as_uri()

    def _at(self, what: str, name: str, line: int, column: int) -> Any:
        place = {"textDocument": {"uri": self._uri(name)}, "position": {"line": line, "character": column}}
        return self._ask(f"textDocument/{what}", **place)

    def _ask(self, method: str, **params: Any) -> Any:
        self._asked += 1
        number = self._asked
        self._send(id=number, method=method, params=params)
        while True:
            answer = self._hear()
            if answer.get("id") == number and "method" not in answer:
                return answer["result"]

    def _hear(self) -> dict[str, Any]:
        """The next message; what the server asks is answered, what it tells is kept."""
        assert self._process.stdout is not None
        length = 0
        while header := self._process.stdout.readline().strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        message = json.loads(self._process.stdout.read(length))
        if "method" in message and "id" in message:
            asked = message["params"].get("items", []) if message["method"] == "workspace/configuration" else None
            answer = None if asked is None else [SETTINGS if i.get("section") == "yaml" else {} for i in asked]
            self._send(id=message["id"], result=answer)
        elif "method" in message:
            self._told.append(message)
        return message

    def _send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()
