import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.stream.StreamSupport;
import org.apache.pulsar.utils.auth.tokens.TokensCliUtils;

/**
 * Runs commands of Apache's `pulsar tokens` in one JVM, because the start of a JVM takes longer than all of them.
 *
 * <p>A line on stdin: ["create", "--subject", "alice"]. The answer is a line on stdout: {"status": 0 or another exit
 * code, "out": "...", "err": "..."}, with what the command wrote. The tool's `main` ends the JVM, so its other entry
 * point is called, which is not public.
 */
public final class Tokens {
    public static void main(String[] unused) throws Exception {
        Constructor<TokensCliUtils> make = TokensCliUtils.class.getDeclaredConstructor();
        make.setAccessible(true);
        Method execute = TokensCliUtils.class.getDeclaredMethod("execute", String[].class);
        execute.setAccessible(true);
        PrintStream answers = System.out;
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        ByteArrayOutputStream err = new ByteArrayOutputStream();
        System.setOut(new PrintStream(out, true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(err, true, StandardCharsets.UTF_8));
        ObjectMapper mapper = new ObjectMapper();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            JsonNode request = mapper.readTree(line);
            String[] words =
                    StreamSupport.stream(request.spliterator(), false).map(JsonNode::asText).toArray(String[]::new);
            out.reset();
            err.reset();
            ObjectNode answer = mapper.createObjectNode();
            answer.put("status", (int) execute.invoke(make.newInstance(), (Object) words));
            System.out.flush();
            System.err.flush();
            answer.put("out", out.toString(StandardCharsets.UTF_8));
            answer.put("err", err.toString(StandardCharsets.UTF_8));
            answers.println(mapper.writeValueAsString(answer));
            answers.flush();
        }
    }
}
