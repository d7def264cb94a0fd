import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.stream.StreamSupport;
import org.apache.pulsar.admin.cli.PulsarAdminTool;

/**
 * Runs commands of Apache's pulsar-admin in one JVM, because the start of a JVM takes seconds.
 *
 * <p>A line on stdin: {"url": "http://host:port", "words": ["topics", "list", "public/default"]}. The answer is a line
 * on stdout: {"status": 0 or 1, "out": "...", "err": "..."}, with what the command wrote.
 */
public final class Admin {
    private static final class Tool extends PulsarAdminTool {
        Tool(Properties properties) throws Exception {
            super(properties);
        }

        boolean runs(String[] words) {
            return run(words);
        }
    }

    /** The tool of a broker. It is kept with its connections, because its start takes longer than most commands. */
    private static Tool tool(Map<String, Tool> tools, String url) throws Exception {
        if (!tools.containsKey(url)) {
            Properties properties = new Properties();
            properties.setProperty("webServiceUrl", url);
            tools.put(url, new Tool(properties));
        }
        return tools.get(url);
    }

    public static void main(String[] unused) throws Exception {
        Map<String, Tool> tools = new HashMap<>();
        PrintStream answers = System.out;
        PrintStream log = System.err;
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        ByteArrayOutputStream err = new ByteArrayOutputStream();
        System.setOut(new PrintStream(out, true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(err, true, StandardCharsets.UTF_8));
        ObjectMapper mapper = new ObjectMapper();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            JsonNode request = mapper.readTree(line);
            String[] words = StreamSupport.stream(request.get("words").spliterator(), false)
                    .map(JsonNode::asText).toArray(String[]::new);
            out.reset();
            err.reset();
            ObjectNode answer = mapper.createObjectNode();
            try {
                answer.put("status", tool(tools, request.get("url").asText()).runs(words) ? 0 : 1);
            } catch (Throwable bug) {
                bug.printStackTrace(log);
                answer.put("status", 1);
                err.writeBytes(bug.toString().getBytes(StandardCharsets.UTF_8));
            }
            System.out.flush();
            System.err.flush();
            answer.put("out", out.toString(StandardCharsets.UTF_8));
            answer.put("err", err.toString(StandardCharsets.UTF_8));
            answers.println(mapper.writeValueAsString(answer));
            answers.flush();
        }
        System.exit(0); // the clients leave threads behind
    }
}
