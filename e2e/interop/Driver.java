import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.FileOutputStream;
import java.io.FileDescriptor;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.File;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.bookie.BookieShell;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeperAdmin;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.CreateBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.WriteFlag;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.util.AvailabilityOfEntriesOfLedger;
import org.apache.bookkeeper.util.EntryFormatter;
import org.apache.bookkeeper.util.LedgerIdFormatter;

/**
 * Apache BookKeeper's client behind a pipe: one JSON object per line of input and output; responses come in any order.
 *
 * <p>A request is {"id": n, "op": name, ...}. Its response is {"id": n, ...result}, or, if the client refused,
 * {"id": n, "code": BKException code, "error": its name}. {"id": n, "bug": text} reports a failure of this program or a
 * request that it does not understand. Commands run concurrently: a caller that needs an order waits for responses.
 * Payloads are not sent, but computed by payload() on both sides; a read checks every byte.
 *
 * <p>The program ends at the end of its input and closes nothing, which looks like a crash to the bookies.
 */
public class Driver {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final PrintStream ANSWERS = new PrintStream(new FileOutputStream(FileDescriptor.out), true);
    private static final int PIPELINE_MAX = 1000;
    private static final long WAIT_SECONDS = 60;

    private final Map<String, BookKeeper> clients = new ConcurrentHashMap<>();
    private final Map<String, LedgerHandle> handles = new ConcurrentHashMap<>();
    private final Object shellLock = new Object();

    /** Payload of entry `entry`. Its size varies by a few bytes, so that lengths are not multiples of a number. */
    static byte[] payload(long seed, long entry, int size) {
        byte[] bytes = new byte[size == 0 ? 0 : size + (int) (entry % 7)];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) (seed * 31 + entry * 7 + i);
        }
        return bytes;
    }

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);  // only answers go to standard output
        ExecutorService workers = Executors.newCachedThreadPool(task -> {
            Thread thread = new Thread(task, "command");
            thread.setDaemon(true);
            return thread;
        });
        Driver driver = new Driver();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode request = JSON.readTree(line);
            workers.execute(() -> driver.answer(request));
        }
        Runtime.getRuntime().halt(0);
    }

    private void answer(JsonNode request) {
        ObjectNode result = JSON.createObjectNode();
        try {
            run(request, result);
        } catch (Throwable thrown) {
            Throwable cause = thrown;
            while ((cause instanceof ExecutionException || cause instanceof CompletionException)
                    && cause.getCause() != null) {
                cause = cause.getCause();
            }
            if (cause instanceof BKException) {
                int code = ((BKException) cause).getCode();
                String name = BKException.create(code).getClass().getSimpleName();
                result.put("code", code).put("error", name.replaceAll("^BK|Exception$", ""));
            } else if (cause instanceof UnsupportedOperationException) {
                result.put("code", 0).put("error", "UnsupportedOperation");
            } else {
                result.put("bug", cause.toString());
                cause.printStackTrace();
            }
        }
        result.set("id", request.get("id"));
        synchronized (ANSWERS) {
            ANSWERS.println(result);
        }
    }

    private void run(JsonNode in, ObjectNode out) throws Exception {
        switch (in.get("op").asText()) {
            case "connect": connect(in); break;
            case "create": create(in, out); break;
            case "open": open(in, out); break;
            case "add": add(in, out); break;
            case "read": read(in, out); break;
            case "batch_read": batchRead(in, out); break;
            case "lac": out.put("lac", await(handle(in).readLastAddConfirmedAsync())); break;
            case "try_lac": out.put("lac", await(handle(in).tryReadLastAddConfirmedAsync())); break;
            case "explicit_lac": out.put("lac", handle(in).readExplicitLastConfirmed()); break;
            case "known_lac": out.put("lac", handle(in).getLastAddConfirmed()); break;
            case "long_poll": longPoll(in, out); break;
            case "force": await(handle(in).force()); out.put("lac", handle(in).getLastAddConfirmed()); break;
            case "close": await(handle(in).closeAsync()); break;
            case "forget": handles.remove(in.get("handle").asText()); break;
            case "delete": client(in).deleteLedger(in.get("ledger").asLong()); break;
            case "metadata": metadata(await(client(in).getLedgerMetadata(in.get("ledger").asLong())), out); break;
            case "entries": entries(in, out); break;
            case "bookies": bookies(in, out); break;
            case "shell": shell(in, out); break;
            default: throw new IllegalArgumentException("unknown op " + in.get("op"));
        }
    }

    /** Connects a client. `settings`: settings of the client by their names in its configuration. */
    private void connect(JsonNode in) throws Exception {
        ClientConfiguration conf = new ClientConfiguration();
        conf.setMetadataServiceUri(in.get("uri").asText());
        in.path("settings").fields().forEachRemaining(e -> conf.setProperty(e.getKey(), e.getValue().asText()));
        BookKeeper before = clients.put(in.get("client").asText(), new BookKeeper(conf));
        if (before != null) {
            throw new IllegalArgumentException("client exists: " + in.get("client"));
        }
    }

    private void create(JsonNode in, ObjectNode out) throws Exception {
        Map<String, byte[]> custom = new HashMap<>();
        in.path("custom").fields().forEachRemaining(e -> custom.put(e.getKey(), bytes(e.getValue())));
        CreateBuilder builder = client(in).newCreateLedgerOp()
                .withEnsembleSize(in.get("e").asInt())
                .withWriteQuorumSize(in.get("qw").asInt())
                .withAckQuorumSize(in.get("qa").asInt())
                .withDigestType(DigestType.valueOf(in.get("digest").asText()))
                .withPassword(bytes(in.get("password")))
                .withCustomMetadata(custom);
        if (in.path("deferred").asBoolean()) {
            builder = builder.withWriteFlags(WriteFlag.DEFERRED_SYNC);
        }
        LedgerHandle handle = (LedgerHandle) await(builder.execute());
        handles.put(in.get("handle").asText(), handle);
        out.put("ledger", handle.getId());
    }

    private void open(JsonNode in, ObjectNode out) throws Exception {
        LedgerHandle handle = (LedgerHandle) await(client(in).newOpenLedgerOp()
                .withLedgerId(in.get("ledger").asLong())
                .withRecovery(in.get("recover").asBoolean())
                .withDigestType(DigestType.valueOf(in.get("digest").asText()))
                .withPassword(bytes(in.get("password")))
                .execute());
        handles.put(in.get("handle").asText(), handle);
        out.put("lac", handle.getLastAddConfirmed()).put("length", handle.getLength());
        out.put("closed", handle.isClosed());
    }

    /** Sends `count` adds, waits for all, and reports the first refusal. Checks the entry ids from `first` on. */
    private void add(JsonNode in, ObjectNode out) throws Exception {
        LedgerHandle handle = handle(in);
        long first = in.get("first").asLong();
        int count = in.get("count").asInt();
        List<CompletableFuture<Long>> window = new ArrayList<>();
        for (long entry = first; entry < first + count; entry++) {
            window.add(handle.appendAsync(payload(in.get("seed").asLong(), entry, in.get("size").asInt())));
            if (window.size() == PIPELINE_MAX || entry == first + count - 1) {
                for (int i = 0; i < window.size(); i++) {
                    long expected = entry - window.size() + 1 + i;
                    long given = await(window.get(i));
                    check(given == expected, "entry id " + given + " instead of " + expected);
                }
                window.clear();
            }
        }
        out.put("last", first + count - 1).put("lac", handle.getLastAddConfirmed());
        out.put("length", handle.getLength());
    }

    private void read(JsonNode in, ObjectNode out) throws Exception {
        long first = in.get("first").asLong();
        long last = in.get("last").asLong();
        LedgerHandle handle = handle(in);
        try (LedgerEntries entries = await(in.path("unconfirmed").asBoolean()
                ? handle.readUnconfirmedAsync(first, last) : handle.readAsync(first, last))) {
            out.put("count", verify(in, entries, first));
        }
    }

    private void batchRead(JsonNode in, ObjectNode out) throws Exception {
        long first = in.get("first").asLong();
        try (LedgerEntries entries = await(handle(in).batchReadAsync(
                first, in.get("max_count").asInt(), in.get("max_size").asLong()))) {
            out.put("count", verify(in, entries, first));
        }
    }

    /** Checks that entries have consecutive ids from `first` on and the expected payloads. Returns their number. */
    private long verify(JsonNode in, LedgerEntries entries, long first) {
        long next = first;
        for (LedgerEntry entry : entries) {
            check(entry.getEntryId() == next, "read entry " + entry.getEntryId() + " instead of " + next);
            verify(in, entry);
            next++;
        }
        return next - first;
    }

    private void verify(JsonNode in, LedgerEntry entry) {
        byte[] expected = payload(in.get("seed").asLong(), entry.getEntryId(), in.get("size").asInt());
        check(java.util.Arrays.equals(entry.getEntryBytes(), expected), "other payload: entry " + entry.getEntryId());
    }

    private void longPoll(JsonNode in, ObjectNode out) throws Exception {
        long begun = System.nanoTime();
        try (LastConfirmedAndEntry answer = await(handle(in).readLastAddConfirmedAndEntryAsync(
                in.get("entry").asLong(), in.get("timeout_ms").asLong(), in.path("parallel").asBoolean()))) {
            out.put("lac", answer.getLastAddConfirmed()).put("has_entry", answer.hasEntry());
            if (answer.hasEntry()) {
                out.put("entry", answer.getEntry().getEntryId());
                verify(in, answer.getEntry());
            }
        }
        out.put("waited_ms", TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - begun));
    }

    private static void metadata(LedgerMetadata metadata, ObjectNode out) {
        out.put("e", metadata.getEnsembleSize()).put("qw", metadata.getWriteQuorumSize());
        out.put("qa", metadata.getAckQuorumSize()).put("state", metadata.getState().name());
        out.put("last", metadata.getLastEntryId()).put("length", metadata.getLength());
        out.put("digest", metadata.getDigestType().name()).put("version", metadata.getMetadataFormatVersion());
        out.put("password", new String(metadata.getPassword(), StandardCharsets.ISO_8859_1));
        ObjectNode custom = out.putObject("custom");
        metadata.getCustomMetadata().forEach(
                (name, value) -> custom.put(name, new String(value, StandardCharsets.ISO_8859_1)));
        ArrayNode segments = out.putArray("segments");
        metadata.getAllEnsembles().forEach((first, ensemble) -> {
            ObjectNode segment = segments.addObject().put("first", first);
            ArrayNode members = segment.putArray("ensemble");
            ensemble.forEach(bookie -> members.add(bookie.toString()));
        });
    }

    /** Reports the entries of a ledger that one bookie lists. */
    private void entries(JsonNode in, ObjectNode out) throws Exception {
        AvailabilityOfEntriesOfLedger available;
        try (BookKeeperAdmin admin = new BookKeeperAdmin(client(in))) {
            available = await(admin.asyncGetListOfEntriesOfLedger(
                    BookieId.parse(in.get("bookie").asText()), in.get("ledger").asLong()));
        }
        ArrayNode present = out.putArray("present");
        for (long entry = 0; entry <= in.get("last").asLong(); entry++) {
            if (available.isEntryAvailable(entry)) {
                present.add(entry);
            }
        }
        out.put("total", available.getTotalNumOfAvailableEntries());
    }

    private void bookies(JsonNode in, ObjectNode out) throws Exception {
        try (BookKeeperAdmin admin = new BookKeeperAdmin(client(in))) {
            ArrayNode writable = out.putArray("writable");
            admin.getAvailableBookies().forEach(bookie -> writable.add(bookie.toString()));
            ArrayNode readOnly = out.putArray("read_only");
            admin.getReadOnlyBookies().forEach(bookie -> readOnly.add(bookie.toString()));
        }
        ObjectNode free = out.putObject("free");
        client(in).getBookieInfo().forEach((bookie, info) -> free.put(bookie.toString(), info.getFreeDiskSpace()));
    }

    /** Runs a command of `bookkeeper shell` in this process, because starting a JVM for each would take seconds.
     *
     * <p>The commands write to standard output and to their loggers, which log4j2.properties sends to standard output.
     * A command that ends with an exception has status 1 and its stack trace at the end of the output, as in a JVM.
     * `properties`: system properties during the command, for example those of its ZooKeeper client.
     */
    private void shell(JsonNode in, ObjectNode out) throws Exception {
        ServerConfiguration conf = new ServerConfiguration();
        conf.loadConf(new File(in.get("conf").asText()).toURI().toURL());
        String[] words = JSON.convertValue(in.get("words"), String[].class);
        synchronized (shellLock) {
            ByteArrayOutputStream said = new ByteArrayOutputStream();
            PrintStream before = System.out;
            Properties properties = System.getProperties();
            Properties changed = (Properties) properties.clone();
            in.path("properties").fields().forEachRemaining(e -> changed.put(e.getKey(), e.getValue().asText()));
            System.setProperties(changed);
            System.setOut(new PrintStream(said, true));
            try {
                BookieShell shell = new BookieShell(
                        LedgerIdFormatter.newLedgerIdFormatter(conf), EntryFormatter.newEntryFormatter(conf));
                shell.setConf(conf);
                out.put("status", shell.run(words));
            } catch (Exception thrown) {
                out.put("status", 1);
                thrown.printStackTrace(System.out);
            } finally {
                System.setOut(before);
                System.setProperties(properties);
                out.put("said", said.toString(StandardCharsets.UTF_8));
            }
        }
    }

    private BookKeeper client(JsonNode in) {
        BookKeeper client = clients.get(in.get("client").asText());
        check(client != null, "no client " + in.get("client"));
        return client;
    }

    private LedgerHandle handle(JsonNode in) {
        LedgerHandle handle = handles.get(in.get("handle").asText());
        check(handle != null, "no handle " + in.get("handle"));
        return handle;
    }

    private static byte[] bytes(JsonNode text) {
        return text.asText().getBytes(StandardCharsets.ISO_8859_1);
    }

    private static <T> T await(CompletableFuture<T> future) throws Exception {
        return future.get(WAIT_SECONDS, TimeUnit.SECONDS);
    }

    private static void check(boolean holds, String otherwise) {
        if (!holds) {
            throw new IllegalStateException(otherwise);
        }
    }
}
