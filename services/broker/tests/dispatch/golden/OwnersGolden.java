// Prints which consumer Apache Pulsar's own classes choose, as the JSON of pulsar_owners.json.
//
// It needs the jars of org.apache.pulsar:pulsar-broker and its dependencies in a directory LIB:
//
//   javac -cp "$LIB/*" -d /tmp/owners OwnersGolden.java
//   java -Dfile.encoding=UTF-8 -cp "/tmp/owners:$LIB/*" org.apache.pulsar.broker.service.OwnersGolden > pulsar_owners.json
//
// The package is Pulsar's, because the constructor of Consumer without a connection is visible in that package only.
package org.apache.pulsar.broker.service;

import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.zip.CRC32;
import org.apache.bookkeeper.mledger.Position;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.client.api.Range;
import org.apache.pulsar.common.api.proto.CommandSubscribe.SubType;
import org.apache.pulsar.common.api.proto.KeySharedMeta;
import org.apache.pulsar.common.util.Murmur3_32Hash;

public class OwnersGolden {
    // A connection that is alive, for the check of a consumer whose ranges overlap those of another.
    static final TransportCnx LIVE = (TransportCnx) Proxy.newProxyInstance(OwnersGolden.class.getClassLoader(),
            new Class<?>[] {TransportCnx.class}, (proxy, method, arguments) ->
                    method.getName().equals("checkConnectionLiveness")
                            ? CompletableFuture.completedFuture(Optional.of(true)) : null);

    static final class Member extends Consumer {
        final int priority;
        final KeySharedMeta ranges = new KeySharedMeta();

        Member(String name, int priority, int... bounds) {
            super(name, 0);
            this.priority = priority;
            for (int i = 0; i < bounds.length; i += 2) {
                ranges.addHashRange().setStart(bounds[i]).setEnd(bounds[i + 1]);
            }
        }

        @Override public int getPriorityLevel() { return priority; }
        @Override public KeySharedMeta getKeySharedMeta() { return ranges; }
        @Override public TransportCnx cnx() { return LIVE; }
        @Override public boolean equals(Object other) { return this == other; }
        @Override public int hashCode() { return System.identityHashCode(this); }
        @Override public String toString() { return consumerName(); }
    }

    static final class ActiveChoice extends AbstractDispatcherSingleActiveConsumer {
        ActiveChoice(int partition, String topic) {
            super(SubType.Failover, partition, topic, null, new ServiceConfiguration(), null);
        }

        int pick(List<Member> members) {
            consumers.addAll(members);
            pickAndScheduleActiveConsumer();
            return members.indexOf(getActiveConsumer());
        }

        @Override protected void scheduleReadOnActiveConsumer() { }
        @Override protected void cancelPendingRead() { }
        @Override protected boolean isConsumersExceededOnSubscription() { return false; }
        @Override protected void reScheduleRead() { }
        @Override public String getName() { return "choice"; }
        @Override public void consumerFlow(Consumer consumer, int permits) { }
        @Override public void redeliverUnacknowledgedMessages(Consumer consumer, long epoch) { }
        @Override public void redeliverUnacknowledgedMessages(Consumer consumer, List<Position> positions) { }
        @Override public void addUnAckedMessages(int count) { }
        @Override public RedeliveryTracker getRedeliveryTracker() { return null; }
    }

    static String quote(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            out.append(c >= ' ' && c < 127 && c != '"' && c != '\\' ? String.valueOf(c) : String.format("\\u%04x", (int) c));
        }
        return out.append('"').toString();
    }

    static String list(List<?> rows) {
        return rows.stream().map(Object::toString).collect(Collectors.joining(", ", "[", "]"));
    }

    // CRC32 over one byte for each hash from `first` to 65535: the index of its owner, 255 if it has none.
    static long owners(StickyKeyConsumerSelector selector, List<Member> members, int first) {
        CRC32 crc = new CRC32();
        for (int hash = first; hash <= 65535; hash++) {
            Consumer owner = selector.select(hash);
            crc.update(owner == null ? 255 : members.indexOf(owner));
        }
        return crc.getValue();
    }

    static List<String> ranges(StickyKeyConsumerSelector selector, Member member) {
        List<Range> found = selector.getConsumerKeyHashRanges().getOrDefault(member, List.of());
        return found.stream().map(r -> "[" + r.getStart() + ", " + r.getEnd() + "]").collect(Collectors.toList());
    }

    // `steps`: a name joins with the next index from 0; "-2" means that the consumer with the index 2 leaves.
    static String ring(String... steps) {
        ConsistentHashingStickyKeyConsumerSelector ring = new ConsistentHashingStickyKeyConsumerSelector(100);
        List<Member> members = new ArrayList<>();
        List<Long> after = new ArrayList<>();
        for (String step : steps) {
            if (step.startsWith("-")) {
                ring.removeConsumer(members.get(Integer.parseInt(step.substring(1))));
            } else {
                Member member = new Member(step, 0);
                members.add(member);
                ring.addConsumer(member).join();
            }
            after.add(owners(ring, members, 1));
        }
        int last = members.size() - 1;
        return String.format("{\"steps\": %s, \"owners_crc32\": %s, \"ranges_of_last\": %s}",
                list(Arrays.stream(steps).map(OwnersGolden::quote).toList()), list(after),
                list(ranges(ring, members.get(last))));
    }

    static String sticky(int[]... bounds) {
        HashRangeExclusiveStickyKeyConsumerSelector sticky = new HashRangeExclusiveStickyKeyConsumerSelector();
        List<Member> members = new ArrayList<>();
        List<String> accepted = new ArrayList<>();
        for (int[] of : bounds) {
            Member member = new Member("c" + members.size(), 0, of);
            members.add(member);
            accepted.add(String.valueOf(!sticky.addConsumer(member).isCompletedExceptionally()));
        }
        return String.format("{\"bounds\": %s, \"accepted\": %s, \"owners_crc32\": %d}",
                list(Arrays.stream(bounds).map(Arrays::toString).toList()), list(accepted), owners(sticky, members, 0));
    }

    static String key(byte[] key) {
        return String.format("{\"key_hex\": \"%s\", \"murmur\": %d, \"auto_split\": %d, \"sticky\": %d}",
                HexFormat.of().formatHex(key), Murmur3_32Hash.getInstance().makeHash(key),
                new ConsistentHashingStickyKeyConsumerSelector(100).makeStickyKeyHash(key),
                new HashRangeExclusiveStickyKeyConsumerSelector().makeStickyKeyHash(key));
    }

    // `consumers`: "name" or "name/priority", in the order in which they joined.
    static String failover(int partition, String topic, String... consumers) {
        List<Member> members = new ArrayList<>();
        List<String> rows = new ArrayList<>();
        for (String text : consumers) {
            String[] parts = text.split("/");
            int priority = parts.length > 1 ? Integer.parseInt(parts[1]) : 0;
            members.add(new Member(parts[0], priority));
            rows.add("[" + quote(parts[0]) + ", " + priority + "]");
        }
        return String.format("{\"partition\": %d, \"topic\": %s, \"consumers\": %s, \"active\": %d}",
                partition, quote(topic), list(rows), new ActiveChoice(partition, topic).pick(members));
    }

    static String section(String name, List<String> rows) {
        return "  " + quote(name) + ": [\n    " + String.join(",\n    ", rows) + "\n  ]";
    }

    public static void main(String[] args) {
        List<String> keys = new ArrayList<>();
        for (String text : List.of("", "a", "ab", "abc", "abcd", "abcde", "key-0", "key-1", "order-1234567890", "schlüssel", "\u20ac")) {
            keys.add(key(text.getBytes(StandardCharsets.UTF_8)));
        }
        keys.add(key(new byte[] {0, (byte) 0xff, (byte) 0x80, 0x7f, 1}));
        // Keys whose hash modulo 65536 and modulo 65535 is 0: the reserved value must be replaced.
        for (int size : new int[] {65535, 65536}) {
            int n = IntStream.iterate(0, i -> i + 1)
                    .filter(i -> Murmur3_32Hash.getInstance().makeHash(("k" + i).getBytes()) % size == 0).findFirst().getAsInt();
            keys.add(key(("k" + n).getBytes()));
        }
        String[] many = IntStream.range(0, 20).mapToObj(i -> "consumer-" + i).toArray(String[]::new);
        List<String> rings = List.of(
                ring("a"), ring("a", "b", "c"), ring("a", "b", "c", "-1", "d"), ring("c", "b", "a"),
                ring("same", "same", "same", "-0", "same"), ring("", "\u00fc", "\ud83d\ude00"), ring(many),
                ring("x", "y", "-0", "-1", "x"));
        List<String> stickies = List.of(
                sticky(new int[] {0, 65535}), sticky(new int[] {0, 32767}, new int[] {32768, 65535}),
                sticky(new int[] {100, 200, 300, 400}, new int[] {201, 299}, new int[] {400, 500}, new int[] {401, 500}),
                sticky(new int[] {10, 20}, new int[] {0, 30}, new int[] {12, 15}, new int[] {7, 7}, new int[] {7, 7}),
                sticky(new int[] {5, 9, 8, 12}, new int[] {5, 12}), sticky(new int[] {9, 5}, new int[] {9, 9}));
        List<String> actives = new ArrayList<>();
        String topic = "persistent://public/default/orders";
        for (int partition = 0; partition < 5; partition++) {
            actives.add(failover(partition, topic + "-partition-" + partition, "c", "a", "b"));
        }
        actives.add(failover(4, topic + "-partition-4", "c/1", "a/2", "b/1", "d/7"));
        actives.add(failover(3, topic + "-partition-3", "same", "same"));
        actives.add(failover(1, topic + "-partition-1", "\ufffd", "\ud83d\ude00"));
        for (int n = 0; n < 12; n++) {
            actives.add(failover(-1, topic + "-" + n, "a", "b", "c"));
            actives.add(failover(-1, topic + "-" + n, "c", "b/0", "a/1", "d", "e"));
        }
        actives.add(failover(-1, topic, "only"));
        actives.add(failover(-1, topic, "same", "same", "same"));
        actives.add(failover(-1, topic, "z/-1", "y/0", "x/-1"));
        actives.add(failover(-1, "persistent://public/default/\u00fc", "\u00fc", "\ufffd", "\ud83d\ude00"));
        System.out.println("{\n" + String.join(",\n", section("keys", keys), section("rings", rings),
                section("sticky", stickies), section("failover", actives)) + "\n}");
    }
}
