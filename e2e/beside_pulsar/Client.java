import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.HashingScheme;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;

/**
 * Produces and consumes with Apache Pulsar's client. A request is a line of JSON on stdin, its answer a line on stdout.
 *
 * <p>{"url": "pulsar://host:port", "topic": "...", "messages": [{"key": "k", "value": "v", "properties": {}}]} produces
 * messages, each as an entry. The answer has their ids, "ledger:entry". Keys choose partitions as Bindery does.
 *
 * <p>{"url": "...", "topic": "...", "subscription": "s", "ack": ["v1", "v2"]} receives with a shared subscription until
 * nothing comes for two seconds, acknowledges the messages that have these values, and answers all messages in the
 * order of their arrival.
 *
 * <p>An answer with "error" reports a request that failed.
 */
public final class Client {
    private static final int TIMEOUT_S = 15;

    public static void main(String[] unused) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        ObjectMapper mapper = new ObjectMapper();
        Map<String, PulsarClient> clients = new HashMap<>();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            JsonNode request = mapper.readTree(line);
            ObjectNode answer = mapper.createObjectNode();
            try {
                String url = request.get("url").asText();
                if (!clients.containsKey(url)) {
                    clients.put(url, PulsarClient.builder().serviceUrl(url)
                            .operationTimeout(TIMEOUT_S, TimeUnit.SECONDS)
                            .lookupTimeout(TIMEOUT_S, TimeUnit.SECONDS).build());
                }
                if (request.has("messages")) {
                    produce(clients.get(url), request, answer.putArray("ids"));
                } else {
                    consume(clients.get(url), request, answer.putArray("messages"));
                }
            } catch (Throwable error) {
                answer.put("error", error.toString());
            }
            answers.println(mapper.writeValueAsString(answer));
            answers.flush();
        }
        System.exit(0); // the clients leave threads behind
    }

    private static void produce(PulsarClient client, JsonNode request, ArrayNode ids) throws Exception {
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(request.get("topic").asText())
                .enableBatching(false).hashingScheme(HashingScheme.Murmur3_32Hash).sendTimeout(TIMEOUT_S, TimeUnit.SECONDS).create()) {
            for (JsonNode one : request.get("messages")) {
                TypedMessageBuilder<String> message = producer.newMessage().value(one.get("value").asText());
                if (one.has("key")) {
                    message.key(one.get("key").asText());
                }
                one.get("properties").fields().forEachRemaining(p -> message.property(p.getKey(), p.getValue().asText()));
                ids.add(text((MessageIdAdv) message.send()));
            }
        }
    }

    private static void consume(PulsarClient client, JsonNode request, ArrayNode found) throws Exception {
        Set<String> ack = new HashSet<>();
        request.get("ack").forEach(one -> ack.add(one.asText()));
        try (Consumer<byte[]> consumer = client.newConsumer().topic(request.get("topic").asText())
                .subscriptionName(request.get("subscription").asText()).subscriptionType(SubscriptionType.Shared)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .isAckReceiptEnabled(true).subscribe()) {
            for (Message<byte[]> message = consumer.receive(2, TimeUnit.SECONDS); message != null;
                    message = consumer.receive(2, TimeUnit.SECONDS)) {
                String value = new String(message.getData(), StandardCharsets.UTF_8);
                ObjectNode one = found.addObject();
                one.put("id", text((MessageIdAdv) message.getMessageId()));
                one.put("value", value);
                one.put("key", message.getKey());
                ObjectNode properties = one.putObject("properties");
                message.getProperties().forEach(properties::put);
                if (ack.contains(value)) {
                    consumer.acknowledge(message);
                }
            }
        }
    }

    private static String text(MessageIdAdv id) {
        return id.getLedgerId() + ":" + id.getEntryId();
    }
}
