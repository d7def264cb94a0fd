"""Record entries that Pulsar's own clients write: a broker for one producer at a time that stores what it is sent.

    python3 -m venv /tmp/recording && /tmp/recording/bin/pip install pulsar-client==3.13.0
    /tmp/recording/bin/python record.py cpp                      # Python's client, which is the C++ client
    javac -cp '<jars>/*' -d /tmp/recording Record.java           # jars of org.apache.pulsar:pulsar-broker 4.0.7
    /tmp/recording/bin/python record.py java java -cp '<jars>/*:/tmp/recording' Record

Each entry becomes a file: `<client>_<name>.bin`, chunks with their number. The name of a topic is the name of its file.
Publish times and encrypted bytes differ between runs; everything else is fixed.
"""

import hashlib
import itertools
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEXT = b"".join(b"%d bottles of beer on the wall, " % n for n in range(199, 0, -1))
"""Payload of messages. Java's client does not compress less than 4 KiB."""
NOISE = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(120)) + bytes(1_000)
"""Payload of messages in chunks, compressed or not."""
CHUNK_MESSAGE_SIZE = 2_000
"""Maximum size of a message on topics of chunks."""
CONNECT, CONNECTED, PRODUCER, SEND, RECEIPT = 2, 3, 5, 6, 7
SUCCESS, CLOSE_PRODUCER, PRODUCER_SUCCESS, PING, PONG = 13, 15, 17, 18, 19
PARTITIONS, PARTITIONS_RESPONSE, LOOKUP, LOOKUP_RESPONSE = 21, 22, 23, 24


def number(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def message(**fields):
    """Encode protobuf: `_3=5` is field 3."""
    out = b""
    for name, value in fields.items():
        field = int(name[1:])
        if isinstance(value, int):
            out += number(field << 3) + number(value)
        else:
            out += number(field << 3 | 2) + number(len(value)) + value
    return out


def parse(data):
    """Return the last value of each field."""
    at, found = 0, {}

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        value = varint()
        if tag & 7 == 2:
            at += value
            value = data[at - value : at]
        found[tag >> 3] = value
    return found


class Broker(socketserver.BaseRequestHandler):
    prefix = ""
    counts: "dict[str, itertools.count[int]]" = {}

    def reply(self, kind, body):
        command = message(_1=kind, **{f"_{kind}": body})
        self.request.sendall(struct.pack(">II", len(command) + 4, len(command)) + command)

    def handle(self):
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = self.request.makefile("rb")
        topic = ""
        while head := stream.read(8):
            total, size = struct.unpack(">II", head)
            command = parse(stream.read(size))
            payload = stream.read(total - 4 - size)
            kind = command[1]
            body = parse(command.get(kind, b""))
            if kind == CONNECT:
                self.reply(CONNECTED, message(_1=b"recorder", _2=19, _3=self.server.message_size_max))
            elif kind == PING:
                self.reply(PONG, b"")
            elif kind == PARTITIONS:
                self.reply(PARTITIONS_RESPONSE, message(_1=0, _2=body[2], _3=0))
            elif kind == LOOKUP:
                url = b"pulsar://127.0.0.1:%d" % self.server.server_address[1]
                self.reply(LOOKUP_RESPONSE, message(_1=url, _3=1, _4=body[2], _5=1))
            elif kind == PRODUCER:
                topic = body[1].decode().rpartition("/")[2]
                self.counts[topic] = itertools.count()
                self.reply(PRODUCER_SUCCESS, message(_1=body[3], _2=b"p-1", _3=2**64 - 1, _4=b""))
            elif kind == SEND:
                index = next(self.counts[topic])
                name = f"{topic}_{index}" if topic.startswith("chunk") else topic
                (HERE / f"{self.prefix}_{name}.bin").write_bytes(payload)
                self.reply(RECEIPT, message(_1=body[1], _2=body[2], _3=message(_1=1, _2=index)))
            elif kind == CLOSE_PRODUCER:
                self.reply(SUCCESS, message(_1=body[2]))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    message_size_max = 5 * 2**20


def serve(message_size_max=5 * 2**20):
    server = Server(("127.0.0.1", 0), Broker)
    server.message_size_max = message_size_max
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"pulsar://127.0.0.1:{server.server_address[1]}"


def record_cpp(url, chunk_url):
    import pulsar

    kinds = pulsar.CompressionType
    for name in ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"):
        client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn))
        for topic, options in (
            ("single", {"batching_enabled": False}),
            ("empty", {"batching_enabled": False}),
            ("batch", {"batching_enabled": True, "batching_max_publish_delay_ms": 10_000}),
        ):
            producer = client.create_producer(
                f"{topic}_{name.lower()}", producer_name="p-1", compression_type=getattr(kinds, name), **options
            )
            if topic == "batch":
                for index, part in enumerate((TEXT, b"", b"last")):
                    producer.send_async(
                        part, None, partition_key="k", ordering_key="o", properties={"n": str(index), "red": "TAGS"}
                    )
                producer.flush()
            else:
                producer.send(b"" if topic == "empty" else TEXT, properties={"red": "TAGS"}, partition_key="k")
        client.close()
    client = pulsar.Client(chunk_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn))
    for name in ("NONE", "LZ4"):
        producer = client.create_producer(
            f"chunk_{name.lower()}", producer_name="p-1", compression_type=getattr(kinds, name), chunking_enabled=True
        )
        producer.send(NOISE, partition_key="k", properties={"red": "TAGS"})
    client.close()
    with tempfile.TemporaryDirectory() as folder:
        private, public = f"{folder}/private.pem", f"{folder}/public.pem"
        subprocess.run(["openssl", "genrsa", "-out", private, "2048"], check=True, stderr=subprocess.DEVNULL)
        subprocess.run(["openssl", "rsa", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
        client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn))
        for topic, batching in (("encrypted_single", False), ("encrypted_batch", True)):
            producer = client.create_producer(
                topic,
                producer_name="p-1",
                compression_type=kinds.LZ4,
                batching_enabled=batching,
                batching_max_publish_delay_ms=10_000,
                encryption_key="key-1",
                crypto_key_reader=pulsar.CryptoKeyReader(public, private),
            )
            for _ in range(3 if batching else 1):
                producer.send_async(TEXT, None, partition_key="k", properties={"red": "TAGS"})
            producer.flush()
        client.close()


if __name__ == "__main__":
    Broker.prefix, *command = sys.argv[1:]
    (server, url), (chunk_server, chunk_url) = serve(), serve(CHUNK_MESSAGE_SIZE)
    if command:
        subprocess.run([*command, url, chunk_url], check=True)
    else:
        record_cpp(url, chunk_url)
